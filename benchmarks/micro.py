"""What a sparse exchange costs apart from the network, part by part, beside a copy of the same bytes.

    select   n elements -> the k largest, added to the residual     once a step
    encode   K entries -> payload, and what it decodes to           once a step, and in each merge
    decode   payload -> entries, checked                            once for each payload that comes
    merge    two payloads' entries -> the next payload, and what is kept   once a hop
    owned    this rank's part of what is kept                       once a hop
    sum      P payloads in rank order (TopK, star)                  once a step
    seal     the update's digest                                    once a step

A copy (`memcpy`) of the payload's bytes, or for `select` of the vector's, is timed in the same run, so that
ratios can be compared between machines.  The median and the least of `--repeats` runs are printed.

Run:  python benchmarks/micro.py [--n 25600000] [--density 0.001] [--out FILE]      (about half a minute)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gridtrain.network.wire.sparse_payload import EncodedSparse, ValueKind, decode, encode_with_decoded
from gridtrain.runtime.buffers.collective_buffers import sparse_digest
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.merge import keep_freed_memory, merge, sum_in_rank_order

PARTS = 4  # payloads in `sum`


@dataclass(frozen=True)
class Cost:
    """One part.  `entries`: what its time is divided by; `copied_bytes`: what the copy beside it moves."""

    part: str
    values: str
    entries: int
    median_s: float
    least_s: float
    copied_bytes: int
    copy_s: float

    def row(self) -> str:
        ns = 1e9 / self.entries
        return (
            f"{self.part:<8}{self.values:<6}{self.median_s * 1e6:>10.0f}{self.least_s * 1e6:>10.0f}"
            f"{self.median_s * ns:>11.2f}{self.median_s / self.copy_s:>13.1f}"
        )


HEADING = f"{'part':<8}{'values':<6}{'median us':>10}{'least us':>10}{'ns / entry':>11}{'x memcpy':>13}"


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(median, least) seconds."""
    times_s = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s[1:]), min(times_s[1:])


def cost(
    part: str, values: str, entries: int, copied_bytes: int, work: Callable[[], Any], repeats: int
) -> Cost:
    source = np.ones(copied_bytes, np.uint8)
    target = np.zeros_like(source)
    copy_s, _ = timed(lambda: np.copyto(target, source), repeats)
    return Cost(part, values, entries, *timed(work, repeats), copied_bytes, copy_s)


def drawn(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest k of n normal values, as a selection finds them; half of the places are everybody's."""
    common = np.random.default_rng(0).choice(n, k // 2, replace=False)
    indices = np.unique(np.concatenate([common, rng.choice(n, k, replace=False)]))
    indices = np.sort(rng.permutation(indices)[:k])
    tails = 3.29 + rng.exponential(0.28, k)  # what lies above the thousandth of a normal distribution
    return indices, np.asarray(tails * rng.choice((-1, 1), k), np.float32)


def sparse_costs(n: int, k: int, kind: ValueKind, repeats: int) -> Iterator[Cost]:
    drawings = [drawn(np.random.default_rng(seed), n, k) for seed in range(1, PARTS + 1)]
    made: list[EncodedSparse] = [encode_with_decoded(*drawing, n=n, kind=kind) for drawing in drawings]
    payload, ours = made[0].payload, [one.sparse for one in made]
    merged = merge(ours[0], ours[1], n=n, k=k, kind=kind)
    work: dict[str, Callable[[], Any]] = {
        "encode": lambda: encode_with_decoded(*drawings[0], n=n, kind=kind),
        "decode": lambda: decode(payload, n=n, max_entries=k, kind=kind),
        "merge": lambda: merge(ours[0], ours[1], n=n, k=k, kind=kind),
        "owned": lambda: merged.truncated_of_owner(4, 1),
        "sum": lambda: sum_in_rank_order(ours),
        "seal": lambda: sparse_digest(merged.sparse),
    }
    for part, doing in work.items():
        yield cost(part, kind.name.lower(), k, len(payload), doing, repeats)


def selection_cost(n: int, k: int, kind: ValueKind, repeats: int) -> Cost:
    feedback = ErrorFeedback(n, "cpu")
    contribution_N = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return cost(
        "select", kind.name.lower(), n, 4 * n, lambda: feedback.prepare(contribution_N, k, kind), repeats
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=25_600_000, help="elements of the vector")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    k = max(1, round(options.density * options.n))
    print(f"n = {options.n}, k = {k}; `select` counts per element of n\n\n{HEADING}")
    costs = []
    for kind in ValueKind:
        for found in sparse_costs(options.n, k, kind, options.repeats):
            print(found.row(), flush=True)
            costs.append(found)
    costs.append(selection_cost(options.n, k, ValueKind.FP16, max(3, options.repeats // 8)))
    print(costs[-1].row())
    if options.out is not None:
        document = {"n": options.n, "k": k, "costs": [asdict(found) for found in costs]}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
