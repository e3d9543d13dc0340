"""Measures selection in nanoseconds per parameter, beside a memory copy and other methods.

Rounds alternate between all cases, so that all are measured in the same minutes; the table has the least and
the median of the rounds.

    gradients    normally distributed, with a scale of each "layer" (log-normal), a few of them in turn
    cold         without a threshold from an earlier step, as in a worker's first step
    carried      with the threshold and the residual of the previous step of error feedback
    wall, CPU    on a busy machine the CPU time of the calling thread is the better measure

Run:  python benchmarks/selection.py --n 2.56e6 25.6e6 --threads 1 --out selection.json
      python benchmarks/selection.py --device cuda --n 25.6e6 138e6
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import record
from gridtrain.sparsify.selection import make_selection
from gridtrain.sparsify.tensor_selection import AccumulationTerms, Selection

_LAYERS = 50
_WEIGHT = 0.3
_COPY_BYTES = 8  # of an element, read and written
_SUM_BYTES = 12  # residual and gradient are read, acc is written
_MOMENTUM_BYTES = 20  # u is read and written, too
_SAMPLED_SHARE, _SAMPLED_ROUNDS = 0.01, 10  # of DGC's own implementation
_SAMPLED_LOW, _SAMPLED_HIGH = 0.8, 1.3


@dataclass
class Figures:
    """The figures of a case.

    Attributes:
        element_bytes: the bytes that must be read and written for each element; 0 if not compared.
        wall_s, cpu_s: of each round.
        misses: how often a carried threshold was too high.
    """

    element_bytes: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    misses: int = 0


@dataclass(frozen=True)
class Case:
    """A measured function; `hint_of` returns the selection that carried a threshold, if there is one."""

    name: str
    run: Callable[[], object]
    element_bytes: int = 0
    hint_of: Callable[[], Selection | None] = lambda: None


class Vectors:
    """The vectors that all cases share, (n,) float32 on the device."""

    def __init__(self, n: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.n, self.device, self.turn = n, device, 0
        self.gradients = [self._gradient(generator) for _ in range(2)]
        self.out = torch.empty(n, device=device)

    def _gradient(self, generator: torch.Generator) -> Tensor:
        gradient = torch.randn(self.n, generator=generator, device=self.device)
        scales = torch.randn(_LAYERS, generator=torch.Generator().manual_seed(2)).exp()
        for layer, scale in zip(gradient.tensor_split(_LAYERS), scales, strict=True):
            layer.mul_(float(scale))
        return gradient

    def next_gradient(self) -> Tensor:
        self.turn += 1
        return self.gradients[self.turn % len(self.gradients)]


class Steps:
    """Steps of error feedback without encoding; acc without the selected entries is the next residual."""

    def __init__(
        self, vectors: Vectors, k: int, *, weight: float = 1.0, momentum: float = 0.0, cold: bool = False
    ) -> None:
        self._vectors, self._k, self._weight, self._momentum = vectors, k, weight, momentum
        self._cold, self.selection = cold, make_selection(vectors.device)
        self._now, self._next = (torch.zeros(vectors.n, device=vectors.device) for _ in range(2))
        self._u, self._next_u = (torch.zeros_like(self._now) if momentum else None for _ in range(2))

    def step(self) -> None:
        selection = make_selection(self._vectors.device) if self._cold else self.selection
        gradient = self._vectors.next_gradient()
        terms = AccumulationTerms(
            self._now, gradient, self._next, self._weight, self._u, self._next_u, self._momentum
        )
        selected = selection.select(terms, self._k)
        values_K = torch.from_numpy(selected.values_K).to(self._next.device)
        self._next.index_add_(0, selected.where_K, values_K, alpha=-1)
        if self._next_u is not None:
            self._next_u.index_fill_(0, selected.where_K, 0.0)
        self._now, self._next = self._next, self._now
        self._u, self._next_u = self._next_u, self._u

    def case(self, name: str) -> Case:
        element_bytes = _MOMENTUM_BYTES if self._momentum else _SUM_BYTES
        return Case(name, self.step, element_bytes, hint_of=lambda: self.selection)


class Sampled:
    """Selection as in DGC (Lin et al. 2018, arXiv 1712.01887), with momentum and residual.

    The threshold is that of a sample of 1 %; it is moved until 0.8 to 1.3 k elements reach it, so that k is
    met only roughly.
    """

    def __init__(self, vectors: Vectors, k: int) -> None:
        self._vectors, self._k = vectors, k
        self._u, self._v = (torch.zeros(vectors.n, device=vectors.device) for _ in range(2))

    def step(self) -> None:
        n, k = self._vectors.n, self._k
        self._u.mul_(0.9).add_(self._vectors.next_gradient())
        importance = self._v.add_(self._u).abs()
        size = min(n, max(k, round(_SAMPLED_SHARE * n)))
        places = torch.randint(n, (size,), device=importance.device)
        threshold = torch.topk(importance[places], max(1, k * size // n)).values.min()
        for _ in range(_SAMPLED_ROUNDS):
            where = torch.nonzero(importance >= threshold).squeeze(1)
            if where.numel() > _SAMPLED_HIGH * k:
                threshold = threshold * _SAMPLED_HIGH
            elif where.numel() < _SAMPLED_LOW * k:
                threshold = threshold * _SAMPLED_LOW
            else:
                break
        self._v[where].cpu(), where.cpu()
        self._v.index_fill_(0, where, 0.0)
        self._u.index_fill_(0, where, 0.0)


def cases(vectors: Vectors, k: int) -> list[Callable[[], Case]]:
    """Return functions that make the cases, in the order of the table."""
    x = vectors.gradients[0]
    settings: dict[str, dict[str, Any]] = {
        "residual update, cold": {"cold": True},
        "residual update, carried": {},
        "weight, momentum, carried": {"weight": _WEIGHT, "momentum": 0.9},
    }
    return [
        lambda: Case("memory copy", lambda: vectors.out.copy_(x), _COPY_BYTES),
        lambda: Case("torch.topk(abs)", lambda: torch.topk(x.abs(), k, sorted=False)),
        lambda: Case("sampled threshold (DGC), momentum", Sampled(vectors, k).step, _MOMENTUM_BYTES),
        *(
            lambda name=name, how=how: Steps(vectors, k, **how).case(f"ours: {name}")
            for name, how in settings.items()
        ),
    ]


def measure(
    n: int, density: float, device: torch.device, rounds: int, budget_s: float, *, alternate: bool = True
) -> dict[str, Figures]:
    """Measure each case once per round, after a round that is not counted, until the time is over.

    Args:
        alternate: whether the rounds alternate between the cases; otherwise one case after the other has all
            its rounds, so that only the vectors of one are in memory.
    """
    vectors = Vectors(n, device)
    makers = cases(vectors, max(1, round(density * n)))
    if alternate:
        return _measure_together([make() for make in makers], device, rounds, budget_s)
    figures: dict[str, Figures] = {}
    for make in makers:
        figures |= _measure_together([make()], device, rounds, budget_s / len(makers))
    return figures


def _measure_together(
    chosen: list[Case], device: torch.device, rounds: int, budget_s: float
) -> dict[str, Figures]:
    figures = {case.name: Figures(case.element_bytes) for case in chosen}
    began_s = time.perf_counter()
    for index in range(rounds + 1):
        for case in chosen:
            wall_s, cpu_s = _timed(case.run, device)
            if index:
                figures[case.name].wall_s.append(wall_s)
                figures[case.name].cpu_s.append(cpu_s)
        if index and time.perf_counter() - began_s > budget_s:
            break
    for case in chosen:
        hint = getattr(case.hint_of(), "hint", None)
        figures[case.name].misses = 0 if hint is None else hint.misses
    return figures


def _timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    settle(device)
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    run()
    settle(device)
    return time.perf_counter() - wall_s, time.thread_time() - cpu_s


def settle(device: torch.device) -> None:
    """Wait until the device has done what was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- results -----------------------------------------------------------------------------------------


def block_of(n: int, density: float, threads: int, figures: dict[str, Figures]) -> dict[str, Any]:
    """Return a block of the JSON file; `x_bytes` is the median over the time of a copy of as many bytes."""
    copied_s = min(figures["memory copy"].wall_s) / _COPY_BYTES
    rows: dict[str, dict[str, float]] = {}
    for name, case in figures.items():
        rows[name] = {
            f"{clock}_ns_{how}": _ns(statistic(getattr(case, f"{clock}_s")), n)
            for clock in ("wall", "cpu")
            for how, statistic in (("min", min), ("median", statistics.median))
        }
        rows[name] |= {"rounds": len(case.wall_s), "misses": case.misses}
        if case.element_bytes:
            over = statistics.median(case.wall_s) / (copied_s * case.element_bytes)
            rows[name]["x_bytes"] = round(over, 3)
    return {"n": n, "density": density, "threads": threads, "cases": rows}


def _ns(seconds: float, n: int) -> float:
    return float(f"{seconds / n * 1e9:.4g}")  # thousandths on a GPU


def table(block: dict[str, Any], device: str) -> str:
    """Return a table in Markdown.  CPU times are only those of the calling thread."""
    heads = ("wall_ns_min", "wall_ns_median", "cpu_ns_min", "cpu_ns_median", "x_bytes", "misses")
    rows = [(name, *map(row.get, heads)) for name, row in block["cases"].items()]
    about = f"n = {block['n']:,}, density {block['density']}, {device}, {block['threads']} thread(s)"
    return f"{about}; ns a parameter\n\n{record.table(('', *heads), rows)}\n"


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--n", type=float, nargs="+", default=[2.56e6, 25.6e6, 138e6])
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=60.0, help="of each size and number of threads")
    args = parser.parse_args()
    device, blocks = torch.device(args.device), []
    for n in (int(n) for n in args.n):
        for threads in dict.fromkeys(args.threads if device.type == "cpu" else [1]):
            torch.set_num_threads(threads)
            figures = measure(n, args.density, device, args.rounds, args.budget_s)
            blocks.append(block_of(n, args.density, threads, figures))
            print(table(blocks[-1], device.type), flush=True)
    record.write(args.out, results=blocks)


if __name__ == "__main__":
    main()
