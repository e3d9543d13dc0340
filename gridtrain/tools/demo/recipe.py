"""What the demo trains and with which settings.  No torch here: the command line reads it too.

The learning rates and densities come from the grid in benchmarks/results/demo_tuning.json (made by
benchmarks/tune_demo.py): every exchange was given the same grid of learning rates, and of each the
setting with the lowest held-out loss after 250 steps was taken.  TopK takes gTop-k's, untuned.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.config import Dense, Exchange, GTopK, TopK

VOCABULARY = 256
BATCH_SIZE = 8
"""Windows a worker takes in a step."""

MEASURE_EVERY = 10
HELD_OUT_WINDOWS = 128
"""A fixed subset, spread evenly: about 45 ms on one CPU thread for the small model."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Width d, layers, attention heads and context in bytes."""

    width: int
    layers: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        """Number of trainable parameters; the head is tied to the token embedding."""
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
    """Plain SGD for all exchanges; a sparse one carries the momentum itself (DGC).

    Attributes:
        label: for people.
        learning_rate: constant over the run.
        momentum: of SGD for dense, of the exchange for sparse ones.
        clip_norm: bound on the norm of the exchanged gradient.
        steps: how far the demo goes; sparse runs go on past the dense one's final loss.
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
    """The exchange that a recipe's name stands for."""
    recipe = RECIPES[name]
    if name == "dense":
        return Dense()
    sparse = TopK if name == "topk" else GTopK
    return sparse(density=density, momentum=recipe.momentum)


def label_for(name: str, density: float = DENSITY) -> str:
    """For people: "dense ring", "gTop-k, density 0.05"."""
    label = RECIPES[name].label
    return label if name == "dense" else f"{label}, density {density:g}"
