"""Measures the cost of each encoding of values, and the share of selected entries that it sends.

    size      bytes of an entry, of 25.6 million elements, by the codec
    cpu       nanoseconds to encode and to decode an entry of the same payload
    sent      for the k largest elements of real gradients and of real changes by local steps: the share of
              magnitudes that is sent, and 1 - |v - q|^2 / |v|^2 (with q = 0 for entries that are not sent)

Gradients have DGC's momentum 0.9, changes are of 6 steps of AdamW; both include the residual of one worker.

    python value_kinds.py results/value_kinds.json        (in benchmarks/; one CPU thread, two minutes)
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accuracy.tune import apply, flat_gradient_N
from accuracy.workloads import WORKLOADS, Workload
from gridtrain.network.wire.sparse_payload import ValueKind, decode, encode, encode_with_decoded
from gridtrain.sparsify.error_feedback import ErrorFeedback

N, DENSITIES = 25_600_000, (0.001, 0.01, 0.03, 0.1)
REAL_DENSITIES, LOCAL_STEPS = (0.01, 0.03), 6
ROUNDS = {"gradient": range(30, 91, 30), "change": range(10, 31, 10)}
"""The rounds that are measured."""


def costs(density: float, kind: ValueKind) -> dict[str, Any]:
    """Measure entries with heavier tails than those of the k largest of a normal distribution."""
    rng, k = np.random.default_rng(0), round(density * N)
    indices_K = np.sort(rng.choice(N, k, replace=False))
    values_K = (rng.choice([-1, 1], k) * (1 + 0.3 * rng.standard_exponential(k))).astype(np.float32)
    times = []
    for _ in range(3):
        began_s = time.perf_counter()
        payload = encode(indices_K, values_K, n=N, kind=kind)
        encoded_s = time.perf_counter()
        sent = decode(payload, n=N, max_entries=k, kind=kind).indices.size
        times.append((encoded_s - began_s, time.perf_counter() - encoded_s))
    encode_s, decode_s = (min(column) for column in zip(*times, strict=True))
    return {
        "density": density,
        "values": kind.name.lower(),
        "entry_bytes": len(payload) / sent,
        "left_out": k - sent,
        "encode_ns": 1e9 * encode_s / k,
        "decode_ns": 1e9 * decode_s / k,
    }


def selected(workload: Workload, what: str, density: float) -> Iterator[Tensor]:
    """Yield the k largest elements (n,) of each measured round, which sends them as fp32."""
    family = {"gradient": "sparse", "change": "local"}[what]
    model, settings = workload.model(0), workload.settings[family]
    optimizer = settings.build(model, momentum=family != "sparse")
    n = sum(parameter.numel() for parameter in model.parameters())
    k = max(1, round(density * n))
    feedback = ErrorFeedback(n, "cpu", 0.9 if what == "gradient" else 0.0)
    generator = torch.Generator().manual_seed(1)

    def gradient_N() -> Tensor:
        drawn = torch.randint(len(workload.train), (workload.batch_size,), generator=generator)
        return flat_gradient_N(workload, model, drawn.tolist())

    for number in range(1, ROUNDS[what][-1] + 1):
        before_N = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        if what == "gradient":
            contribution_N = gradient_N()
        else:
            for _ in range(LOCAL_STEPS):
                apply(model, gradient_N(), optimizer, settings.clip_norm)
            contribution_N = before_N - nn.utils.parameters_to_vector(model.parameters()).detach()
        prepared = feedback.prepare(contribution_N, k, ValueKind.FP32)
        feedback.commit(prepared, [])
        update_N = torch.zeros(n)
        update_N[torch.from_numpy(prepared.decoded.indices)] = torch.from_numpy(prepared.decoded.values)
        if number in ROUNDS[what]:
            yield update_N
        if what == "gradient":
            apply(model, update_N, optimizer, settings.clip_norm)
        else:
            nn.utils.vector_to_parameters(before_N - update_N, model.parameters())


def shares(name: str, what: str, density: float) -> Iterator[dict[str, Any]]:
    found: dict[ValueKind, list[tuple[float, float]]] = {kind: [] for kind in ValueKind}
    for vector_N in selected(WORKLOADS[name](), what, density):
        indices_K = np.flatnonzero(vector_N.numpy())
        values_K = vector_N.numpy()[indices_K]
        for kind in ValueKind:
            sent = encode_with_decoded(indices_K, values_K, n=vector_N.numel(), kind=kind).sparse
            exact_K = values_K.astype(np.float64)
            rest_K = exact_K.copy()
            where = np.searchsorted(indices_K, sent.indices)
            covered = float(np.abs(exact_K[where]).sum() / np.abs(exact_K).sum())
            rest_K[where] -= sent.values
            found[kind].append((covered, 1 - float((rest_K**2).sum() / (exact_K**2).sum())))
    for kind, pairs in found.items():
        magnitude, square = (min(column) for column in zip(*pairs, strict=True))
        case = {"workload": name, "what": what, "density": density, "values": kind.name.lower()}
        yield {**case, "least_magnitude_share": magnitude, "least_square_share": square}


def main() -> None:
    torch.set_num_threads(1)
    made: dict[str, Any] = {"command": "python value_kinds.py", "date": datetime.date.today().isoformat()}
    made["costs"] = [costs(density, kind) for density in DENSITIES for kind in ValueKind]
    made["sent"] = [
        row
        for name in ("gpt", "lstm")
        for what in ("gradient", "change")
        for density in REAL_DENSITIES
        for row in shares(name, what, density)
    ]
    text = json.dumps(made, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
