"""Models whose gradients torch combines are refused by `site.optimizer`; each refusal is printed.

A process of its own: torch's meshes leave threads behind that do not survive a fork.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from gridtrain.adapters import site
from gridtrain.errors import ConfigError

warnings.filterwarnings("ignore", "FSDP is switching to use")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for wrap in (
    nn.parallel.DistributedDataParallel,
    lambda model: nn.Sequential(nn.parallel.DistributedDataParallel(model)),
    lambda model: FullyShardedDataParallel(model, device_id="cpu"),
    lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
):
    for rank in (0, 1):
        model = wrap(nn.Linear(1, 1))
        channel: Any = SimpleNamespace(rank=rank, world_size=2)
        try:
            site.Site(None, channel).optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        except ConfigError as error:
            print(error.reason.partition(",")[0])
dist.destroy_process_group()
