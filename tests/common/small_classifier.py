"""A small classifier, its batches and its plain optimizers, for training without a grid."""

import torch
from torch import nn
from torch.nn import functional as F


def small_model(dtype=torch.float32):
    """The same on each worker."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * 0.3 / (number + 1))
    return model.to(dtype)


def batch(seed, size=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def backward_on(model, data):
    inputs, labels = data
    first = next(model.parameters())
    F.cross_entropy(model(inputs.to(first)).float(), labels.to(first.device)).backward()


def backward(model, seed):
    backward_on(model, batch(seed))


def train_step(model, optimizer, seed):
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
