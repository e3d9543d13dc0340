"""Measures the error of rounded dense values, by kind and by the size of blocks that share a scale.

The vectors are the gradients of the byte GPT at the start and after some steps of training.  An error is the
root mean square of the rounding errors of one rounding, in percent of that of the values.

    python dense_values.py --out results/recorded/dense-values.json          (in benchmarks/; a minute)
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader

import record
from accuracy.workloads import WORKLOADS
from gridtrain.config import DENSE_VALUES
from gridtrain.network.wire import value_encoding
from gridtrain.network.wire.dense_payload import encode_slice
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind

BLOCKS = (32, 64, 128, 256, 512, 1024, 4096)


def gradients(steps: int) -> list[np.ndarray]:
    """Return the gradients of the first batch, and of the batch after `steps` steps."""
    workload = WORKLOADS["gpt"]()
    model, settings = workload.model(0), workload.settings["dense"]
    optimizer, found = settings.build(model), []
    torch.manual_seed(1)
    batches = iter(DataLoader(workload.train, workload.batch_size, shuffle=True))
    for step in range(steps + 1):
        optimizer.zero_grad()
        workload.loss(model, *next(batches)).backward()  # type: ignore[no-untyped-call]
        if step in (0, steps):
            found.append(
                torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy()
            )
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
    return found


def error_percent(vectors: list[np.ndarray], kind: ValueKind) -> float:
    """Return the larger error of the vectors."""
    errors = [np.linalg.norm(v - encode_slice(v, kind)[1]) / np.linalg.norm(v) for v in vectors]
    return float(f"{100 * max(errors):.3g}")


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    vectors = gradients(options.steps)
    figures = {f"{kind}-error-percent": error_percent(vectors, VALUE_KINDS[kind]) for kind in DENSE_VALUES}
    for block in BLOCKS:
        value_encoding.SCALE_BLOCK = block
        figures[f"block-{block}-error-percent"] = error_percent(vectors, ValueKind.INT8)
    for name, value in figures.items():
        print(f"{name:24} {value}")
    note = f"byte GPT, {vectors[0].size} parameters; the larger error of both gradients"
    record.write(options.out, note=note, figures=figures)


if __name__ == "__main__":
    main()
