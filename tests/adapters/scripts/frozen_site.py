"""A site of two that trains the last of its layers.  Each process prints what the leader has sent."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import gridtrain
from gridtrain.adapters.site import Site

broadcast, sent = dist.broadcast, []


def _count(tensor, *args, **kwargs):
    sent.append(tensor.numel())
    return broadcast(tensor, *args, **kwargs)


dist.broadcast = _count
torch.set_num_threads(1)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, affine=False), nn.Linear(32, 1))
model[0].requires_grad_(False)
points = list(torch.randn(512, 8))
with Site.enter() as site:
    if site.rank == 1:
        model[2].weight.data.zero_()  # the leader's values replace these
    optimizer = site.optimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.01), model, exchange=gridtrain.Dense()
    )
    for x_BF in site.batches(points, batch_size=4, steps=3):
        (model(x_BF) - x_BF.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [parameter.tolist() for parameter in model[2].parameters()]
    end = json.dumps({"mark": "end", "sent": sent, "trained": trained})
    sys.stdout.write(end + "\n")  # one write, because the processes of a site share the output
    sys.stdout.flush()
