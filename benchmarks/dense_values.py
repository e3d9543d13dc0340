"""Measures rounded dense values: bytes of a step, and the rounding error by the size of blocks.

The vectors are the gradients of the byte GPT at the start and after some steps of training.  An error is the
root mean square of the rounding errors of one rounding, in percent of that of the values.

    python dense_values.py --out results/recorded/dense-values.json          (in benchmarks/; a minute)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path

import numpy as np
import torch

from accuracy.butterfly import WORKERS
from accuracy.dense_ring import DenseRing
from accuracy.tune import apply, flat_gradient_N
from accuracy.workloads import WORKLOADS
from gridtrain.config import DENSE_VALUES
from gridtrain.network.wire import value_encoding
from gridtrain.network.wire.dense_payload import encode_slice
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind

BLOCKS = (32, 64, 128, 256, 512, 1024, 4096)
STEPS = 100


def gradients(steps: int) -> list[np.ndarray]:
    """Return the gradients of the first batch, and of the batch after `steps` steps."""
    workload = WORKLOADS["gpt"]()
    model, size = workload.model(0), workload.batch_size
    settings = workload.settings["dense"]
    optimizer = settings.build(model, momentum=True)
    order = torch.randperm(len(workload.train), generator=torch.Generator().manual_seed(1)).tolist()  # type: ignore[arg-type]
    found = []
    for step in range(steps + 1):
        taken = [order[(step * size + i) % len(order)] for i in range(size)]
        gradient_N = flat_gradient_N(workload, model, taken)
        if step in (0, steps):
            found.append(gradient_N.numpy().copy())
        apply(model, gradient_N, optimizer, settings.clip_norm)
    return found


def error_percent(vector_N: np.ndarray, kind: ValueKind) -> float:
    _, rounded_N = encode_slice(vector_N, kind)
    return float(100 * np.linalg.norm(vector_N - rounded_N) / np.linalg.norm(vector_N))


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    vectors, figures = gradients(options.steps), dict[str, float]()
    n = vectors[0].size
    for values in DENSE_VALUES:
        ring = DenseRing(n, values)
        ring.exchange([torch.from_numpy(vectors[0])] * WORKERS)
        figures[f"{values}-sent-bytes"] = max(ring.sent_bytes)
        errors = [error_percent(vector_N, VALUE_KINDS[values]) for vector_N in vectors]
        figures[f"{values}-error-percent"] = float(f"{max(errors):.2g}")
    for block in BLOCKS:
        value_encoding.SCALE_BLOCK = block
        errors = [error_percent(vector_N, ValueKind.INT8) for vector_N in vectors]
        figures[f"block-{block}-bytes-per-element"] = round(1 + 2 / block, 4)
        figures[f"block-{block}-error-percent"] = float(f"{max(errors):.3g}")
    found = {
        "command": f"python dense_values.py --steps {options.steps}",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores",
        "note": f"byte GPT, {n} parameters, {WORKERS} workers; the larger error of both gradients",
        "figures": figures,
    }
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
