"""How much 8 bits take from values that share a scale, by how many share it: on gradients of the demo's GPT.

Decides nothing at run time; decision 0021 quotes its table.  Real gradients of one worker's batch, before
training and after some dense steps; of each the k largest entries, in the order of their indices.

    loss   2-norm of what rounding takes, as a part of the 2-norm of the k entries
    scale  a power of two that brings the largest of a block to 64 .. 127; "all": one for the payload

Run:  cd benchmarks; python rounding.py            (some seconds)
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from gridtrain.tools.demo.recipe import RECIPES
from tune_demo import BATCH_SIZE, MOMENTUM, WORKERS, Lesson

DENSITIES = (0.05, 0.01)
BLOCKS = (64, 256, 1024, 4096, 0)
"""Entries that share a scale; 0: all."""

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def largest(gradient_N: Floats, density: float) -> Floats:
    """Values of the k largest, (k,), in the order of their indices."""
    k = max(1, round(density * len(gradient_N)))
    indices_K = np.sort(np.argsort(-np.abs(gradient_N), kind="stable")[:k])
    return gradient_N[indices_K]


def rounded(values_K: Floats, block: int) -> Floats:
    """What 8 bits make of them: PROTOCOL.md, 5.2, for blocks of any length."""
    out = np.empty_like(values_K)
    for start in range(0, len(values_K), block or len(values_K)):
        part = values_K[start : start + (block or len(values_K))]
        _, exponent = np.frexp(np.abs(part).max())
        scale = np.ldexp(1.0, max(int(exponent) - 7, -149))
        out[start : start + len(part)] = np.clip(np.rint(part / scale), -127, 127) * scale
    return out


def loss(values_K: Floats, block: int) -> float:
    return float(np.linalg.norm(values_K - rounded(values_K, block)) / np.linalg.norm(values_K))


def gradient_after(steps: int, seed: int) -> Floats:
    """One worker's, (n,), after so many steps of dense SGD with the demo's settings."""
    lesson = Lesson(seed)
    optimizer = torch.optim.SGD(lesson.parameters, lr=RECIPES["dense"].learning_rate, momentum=MOMENTUM)
    samples = WORKERS * BATCH_SIZE
    for step in range(steps):
        lesson.apply(lesson.gradient_N(step * samples, samples), optimizer)
    return lesson.gradient_N(steps * samples, BATCH_SIZE).numpy().astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 50])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = [str(block or "all") for block in BLOCKS]
    print("| density | after steps | " + " | ".join(heads) + " |\n" + "|---" * (2 + len(heads)) + "|")
    for steps in options.steps:
        gradient_N = gradient_after(steps, options.seed)
        for density in DENSITIES:
            values_K = largest(gradient_N, density)
            cells = [f"{100 * loss(values_K, block):.2f} %" for block in BLOCKS]
            print(f"| {density:g} | {steps} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
