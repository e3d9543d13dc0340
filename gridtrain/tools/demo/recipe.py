"""The demo's settings (sizes, batch, learning rates, densities, steps).  This module does not import torch.

The learning rates and densities come from the grid search in benchmarks/results/demo_tuning.json (`python -m
accuracy.tune --workloads gpt` in benchmarks/ repeats it).  Every exchange was given the same grid of learning
rates, and for each the setting with the lowest held-out loss after 250 steps was chosen.  TopK was not tuned:
it has the settings of gTop-k.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.config import Dense, Exchange, GTopK, TopK

VOCABULARY = 256
BATCH_SIZE = 8
"""The number of windows that a worker processes in a step."""

MEASURE_EVERY = 10
HELD_OUT_WINDOWS = 128
"""The size of the fixed held-out subset; the small model evaluates it in about 45 ms on one CPU thread."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model: width d, layers, attention heads and context in bytes."""

    width: int
    layers: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        """The number of trainable parameters; the head is tied to the token embedding."""
        d = self.width
        attention, mlp, norms = 4 * d * d + 4 * d, 8 * d * d + 5 * d, 4 * d
        return VOCABULARY * d + self.context * d + self.layers * (attention + mlp + norms) + 2 * d


SIZES = {
    "tiny": ModelSize(width=32, layers=1, heads=2, context=32),
    "small": ModelSize(width=64, layers=2, heads=4, context=64),
    "medium": ModelSize(width=128, layers=2, heads=4, context=64),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of one exchange.  The optimizer is SGD; a sparse exchange applies momentum itself (DGC).

    Attributes:
        label: the name of the exchange for display.
        learning_rate: the learning rate, constant throughout the run.
        momentum: the momentum; SGD applies it with the dense exchange, a sparse exchange applies it itself.
        clip_norm: the maximum 2-norm of the exchanged update.
        steps: the number of steps in the demo; sparse runs have more, to reach the dense run's final loss.
    """

    label: str
    learning_rate: float
    momentum: float
    clip_norm: float
    steps: int

    @property
    def quick_steps(self) -> int:
        return max(20, self.steps // 10)


DENSITY = 0.05

RECIPES = {
    "dense": Recipe("dense ring", learning_rate=0.2, momentum=0.9, clip_norm=1.0, steps=250),
    "gtopk": Recipe("gTop-k", learning_rate=0.4, momentum=0.9, clip_norm=1.0, steps=450),
    "topk": Recipe("TopK", learning_rate=0.4, momentum=0.9, clip_norm=1.0, steps=450),
}


def exchange_for(name: str, density: float = DENSITY) -> Exchange:
    """Return the exchange of the recipe `name`."""
    recipe = RECIPES[name]
    if name == "dense":
        return Dense()
    sparse = TopK if name == "topk" else GTopK
    return sparse(density=density, momentum=recipe.momentum)


def label_for(name: str, density: float = DENSITY) -> str:
    """Return a label of the exchange, such as "dense ring" or "gTop-k, density 0.05"."""
    label = RECIPES[name].label
    return label if name == "dense" else f"{label}, density {density:g}"
