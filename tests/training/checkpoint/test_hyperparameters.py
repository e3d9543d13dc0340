"""An optimizer's settings as JSON and back."""

import json

import numpy as np
import torch
from torch import nn

from gridtrain.training.checkpoint.hyperparameters import hyperparameters_json, load_hyperparameters


def test_numbers_of_numpy_are_settings():
    """Otherwise they are not compared, and a newcomer keeps its own."""
    optimizers = [torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=np.float32(rate)) for rate in (0.5, 0.25)]
    before, other = (hyperparameters_json(each) for each in optimizers)
    assert before != other
    load_hyperparameters(optimizers[0], json.loads(other)[1])
    assert hyperparameters_json(optimizers[0]) == other
