"""One process of a site of two, without a run: `ending_site.py RANK FILE HOW`.

Each process prints `stepped` after its second step, and then ends as HOW says.
"""

import signal
import sys

import torch
import torch.distributed as dist
from lone_site import Grid
from torch import nn

from gridtrain.adapters import site as sites
from gridtrain.runtime.process_hooks import install_error_hook

rank, file, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]

install_error_hook()
sites.join = lambda *_: Grid()  # type: ignore[assignment]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
model = nn.Linear(1, 1)
with sites.Site.enter() as site:
    optimizer = site.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for step, x_BF in enumerate(site.batches(list(torch.ones(2, 1)), batch_size=1, steps=9)):
        if step == 2:
            match how.split():
                case ["break"]:
                    break
                case ["SIGINT" | "SIGTERM" as name]:
                    signal.raise_signal(signal.Signals[name])
                case [number, "raises"] if rank == int(number):
                    raise ValueError("a bad sample")
                case ["0", "waits"] if rank == 0:
                    sites._PROCESS_TIMEOUT_S = 0.1
                case ["0", "waits"]:
                    dist.recv(torch.zeros(1), 0)  # until the leader has ended
                case [number, "breaks"] if rank == int(number):
                    break
        model(x_BF).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            print("stepped", flush=True)
            if how == f"{rank} raises after the step":
                raise ValueError("a bad file")
