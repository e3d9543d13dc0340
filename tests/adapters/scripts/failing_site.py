"""A site of two whose second process fails in its fifth step, or (`killed`) just disappears."""

import os
import signal
import sys

import torch
from torch import nn

import gridtrain
from gridtrain.adapters.site import Site

how = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(3)
model = nn.Linear(4, 1)
points = list(torch.randn(512, 4))
with Site.enter() as site:
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = site.optimizer(inner, model, exchange=gridtrain.Dense())
    for step, x_BF in enumerate(site.batches(points, batch_size=2, steps=40)):
        if site.rank == 1 and step == 4:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad sample")
        (model(x_BF) - x_BF.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
