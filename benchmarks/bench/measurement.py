"""Measures cells.  Those of the same link take turns, A B A B, so that other load affects all of them.

gridtrain's groups wait at a barrier between their turns; a rival's group is started again for each block.
All groups of a link share the hosts, so that they have the same links.

    link 1    cell A: r repeats | rival: r repeats | cell B: r repeats |   block 1
              cell A: r repeats | rival: r repeats | cell B: r repeats |   block 2
    link 2    ...
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.bounds import bound_s
from bench.cells import Cell, Link
from bench.results import CellResult, Sample
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.tools.bench.bench_group import BenchGroup, BenchSetting, LocalHost, start_group
from lab import link as lab_link
from lab.group import LabHosts
from lab.net import Net, why_not
from lab.ns import LabError
from procfs import machine_cpu_s
from rivals.contract import OPS, Request, Result
from rivals.hosts import PORT, measure

Log = Callable[[str], None]
TURN_S, MAX_REPEATS = 1.0, 40
RIVAL_START_S, RIVAL_REPEAT_S = 180.0, 120.0
VECTOR_BYTES = 16
"""For each element of a member's vector: gradient, scaled copy, residual and its second buffer."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of repeats: `blocks` turns of at least `repeats`, after `warmup` that are not counted."""

    blocks: int = 2
    repeats: int = 3
    warmup: int = 1
    loopback: bool = False

    def repeats_of(self, cell: Cell) -> int:
        """Return more repeats for short exchanges: about `TURN_S` a turn if the cell is at its bound."""
        least_s = bound_s(cell)
        return max(self.repeats, min(MAX_REPEATS, int(TURN_S / least_s))) if least_s else self.repeats


def why_no_link(link: Link) -> str:
    """Return why this machine cannot provide a link; empty if it can."""
    return why_not() or (lab_link.why_not() if link.delay_s else "")


@contextlib.contextmanager
def hosts_of(link: Link, *, loopback: bool = False) -> Iterator[LabHosts | LocalHost]:
    """Provide the hosts of a link.

    Args:
        loopback: whether to use loopback, where members limit their own rates and there is no delay.

    Raises `ConfigError` if this machine cannot provide the link.
    """
    if loopback:
        if link.delay_s:
            raise ConfigError(f"{link}: loopback has no delay", remedy="use namespaces (root)")
        yield LocalHost(link.rate)
        return
    if reason := why_no_link(link):
        raise ConfigError(f"{link}: {reason}", remedy="measure on Linux as root, or with --loopback")
    names = [f"worker-{number}" for number in range(1, link.workers + 1)]
    with Net() as net:
        yield LabHosts(net, names, rate=link.rate, delay_s=link.delay_s, hub_rate=link.rate)


def by_link(cells: Sequence[Cell]) -> list[tuple[Link, list[Cell]]]:
    """Group cells by link, in order of first appearance and without repetitions."""
    groups: dict[Link, list[Cell]] = {}
    for cell in dict.fromkeys(cells):
        groups.setdefault(cell.link, []).append(cell)
    return list(groups.items())


def measure_cells(
    cells: Sequence[Cell], effort: Effort, reasons: Mapping[str, str], log: Log
) -> Iterator[CellResult]:
    """Measure cells and yield the results of each link; a skipped cell has a reason.

    Args:
        reasons: for each rival, why it cannot run here; empty if it can.
    """
    for link, own in by_link(cells):
        results = [CellResult(cell, bound_s(cell)) for cell in own]
        for result in results:
            if rival := result.cell.rival:
                result.skipped = reasons.get(rival, f"there is no rival {rival!r}")
                if not result.skipped and effort.loopback:
                    result.skipped = "rivals are measured in namespaces: they cannot limit themselves"
        runnable = [result for result in results if not result.skipped]
        try:
            for wave in _waves(runnable, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2):
                _measure_wave(link, wave, effort, log)
        except (ConfigError, LabError) as error:
            for result in runnable:
                result.skipped = result.skipped or ("" if result.samples else str(error))
        yield from results


def _waves(results: Sequence[CellResult], memory_bytes: int) -> Iterator[list[CellResult]]:
    """Group cells of one vector size into waves that fit into memory; a wave's cells take turns."""
    for n in dict.fromkeys(result.cell.n for result in results):
        wave: list[CellResult] = []
        used_bytes = 0
        for result in (result for result in results if result.cell.n == n):
            size_bytes = 0 if result.cell.rival else VECTOR_BYTES * n * result.cell.link.workers
            if wave and used_bytes + size_bytes > memory_bytes:
                yield wave
                wave, used_bytes = [], 0
            wave.append(result)
            used_bytes += size_bytes
        yield wave


def _measure_wave(link: Link, wave: Sequence[CellResult], effort: Effort, log: Log) -> None:
    groups: dict[Cell, BenchGroup] = {}
    with (
        tempfile.TemporaryDirectory(prefix="gridtrain-bench-") as place,
        hosts_of(link, loopback=effort.loopback) as hosts,
        contextlib.ExitStack() as stack,
    ):
        turns = itertools.product(range(effort.blocks), wave)
        for number, (block, result) in enumerate(turns):
            if result.skipped:
                continue
            cell, folder = result.cell, Path(place, str(number))
            log(f"{link}: {cell.label}, n = {cell.n:,}, block {block + 1} of {effort.blocks}")
            repeats, warmup = effort.repeats_of(cell), effort.warmup
            try:
                if cell.rival:
                    assert isinstance(hosts, LabHosts)
                    samples = _rival_samples(cell, hosts, folder, repeats, warmup, PORT + 2 * number)
                else:
                    if cell in groups:
                        warmup = 0
                    else:
                        setting = BenchSetting(cell.exchange_text, link.workers, cell.n, cell.encrypted)
                        groups[cell] = stack.enter_context(start_group(setting, hosts, folder))
                    samples = [_measure_once(groups[cell]) for _ in range(warmup + repeats)][warmup:]
            except (GridtrainError, LabError) as error:
                result.skipped = f"failed: {error}"
                log(f"{cell.label}: {result.skipped}")
                continue
            result.samples += [replace(sample, block=block) for sample in samples]


def _rival_samples(
    cell: Cell, hosts: LabHosts, folder: Path, repeats: int, warmup: int, port: int
) -> list[Sample]:
    request = Request(op=cell.op, n=cell.n, density=cell.density, repeats=repeats, warmup=warmup)
    limit_s = RIVAL_START_S + RIVAL_REPEAT_S * (repeats + warmup)
    return samples_of(measure(list(hosts.workers.values()), cell.rival, request, folder, limit_s, port))


def samples_of(found: Result) -> list[Sample]:
    """Return a rival's repeats, with its version and its algorithm as a note."""
    note = "; ".join(filter(None, (found.version, OPS[found.rival][found.op], found.note)))
    sent: Sequence[float | None] = found.bytes_sent or [None] * len(found.seconds)
    return [
        Sample(seconds=seconds, cpu_s=cpu_s, sent_bytes=sent_bytes, note=note)
        for seconds, cpu_s, sent_bytes in zip(found.seconds, found.cpu_s, sent, strict=True)
    ]


def _measure_once(group: BenchGroup) -> Sample:
    group.wait()
    began_s, before_s = time.monotonic(), machine_cpu_s()
    repeat = group.repeat()
    cores_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
    return Sample(**asdict(repeat), machine_use=(machine_cpu_s() - before_s) / cores_s)
