"""One process of a site of two, without a run, with `unused="skip"`: `branching_site.py RANK FILE BRANCHES`.

BRANCHES is JSON: for each step the branches "", "a", "b" or "ab" of the model that each process uses.  At its
end, each process prints the parameters of both branches as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist
from lone_site import Grid
from torch import nn

from gridtrain.adapters import site as sites

rank, file, branches_by_step = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

sites.join = lambda *_: Grid()  # type: ignore[assignment]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
model = nn.ParameterDict({branch: torch.ones(1) for branch in "ab"})
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
with sites.Site.enter() as site:
    optimizer = site.optimizer(inner, model, unused="skip")
    batches = site.batches(torch.tensor([1.0, 2.0]), batch_size=1, steps=len(branches_by_step))
    for used, x_B in zip(branches_by_step, batches, strict=True):
        if used[rank]:
            sum((model[branch] * x_B).square().mean() for branch in used[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
sys.stdout.write(json.dumps({branch: model[branch].item() for branch in "ab"}) + "\n")
