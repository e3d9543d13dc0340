"""Measures cells.  Those of the same link take turns, A B A B, so that other load affects all of them.

gridtrain's groups wait at a barrier between their turns; a rival's group is started again for each block.

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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from bench import rival_block
from bench.bounds import bound_s
from bench.cells import Cell, Link
from bench.link_hosts import Namespaces, hosts_of
from bench.results import CellResult, Sample
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.tools.bench.bench_group import BenchGroup, BenchSetting, ExchangeSample, LocalHost, start_group
from lab.ns import LabError

Log = Callable[[str], None]
TURN_S, MOST_REPEATS = 1.0, 10
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
        return max(self.repeats, min(MOST_REPEATS, int(TURN_S / least_s))) if least_s else self.repeats


def by_link(cells: Sequence[Cell]) -> list[tuple[Link, list[Cell]]]:
    """Group cells by link, in order of first appearance and without repetitions."""
    groups: dict[Link, list[Cell]] = {}
    for cell in cells:
        own = groups.setdefault(cell.link, [])
        if cell not in own:
            own.append(cell)
    return list(groups.items())


def measure_cells(
    cells: Sequence[Cell], effort: Effort, reasons: Mapping[str, str], log: Log
) -> Iterator[CellResult]:
    """Measure cells, and yield the results of each link; a skipped cell has a reason."""
    for link, own in by_link(cells):
        results = [CellResult(cell, bound_s(cell)) for cell in own]
        for result in results:
            if result.cell.rival and (reason := rival_block.why_not(result.cell, reasons)):
                result.skipped = reason
            elif result.cell.rival and effort.loopback:
                result.skipped = "rivals are measured in namespaces: they cannot limit themselves"
        runnable = [result for result in results if not result.skipped]
        try:
            for wave in _waves(runnable, half_of_the_memory()):
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
        if wave:
            yield wave


def half_of_the_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _measure_wave(link: Link, wave: Sequence[CellResult], effort: Effort, log: Log) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gridtrain-bench-") as folder,
        hosts_of(link, loopback=effort.loopback) as hosts,
        contextlib.ExitStack() as groups,
    ):
        session = _LinkSession(hosts, Path(folder), groups, effort)
        for block in range(effort.blocks):
            for result in wave:
                if result.skipped:
                    continue
                size = f"n = {result.cell.n:,}"
                log(f"{link}: {result.cell.label}, {size}, block {block + 1} of {effort.blocks}")
                try:
                    samples = session.run_block(result.cell)
                except (GridtrainError, LabError) as error:
                    result.skipped = f"failed: {error}"
                    log(f"{result.cell.label}: {result.skipped}")
                    continue
                result.samples += [replace(sample, block=block) for sample in samples]


class _LinkSession:
    """The hosts of a link, and gridtrain's groups that run on them."""

    def __init__(
        self, hosts: Namespaces | LocalHost, folder: Path, groups: contextlib.ExitStack, effort: Effort
    ) -> None:
        self._hosts, self._folder, self._groups, self._effort = hosts, folder, groups, effort
        self._numbers = itertools.count()
        self._ours: dict[Cell, BenchGroup] = {}

    def run_block(self, cell: Cell) -> list[Sample]:
        """Return the samples of one block.  Raises `GridtrainError`."""
        effort, number = self._effort, next(self._numbers)
        repeats = effort.repeats_of(cell)
        folder = self._folder / str(number)
        if cell.rival:
            assert isinstance(self._hosts, Namespaces)
            rival = rival_block.RivalBlock(cell, self._hosts, folder, number)
            return rival.run(repeats, effort.warmup)
        warmup = 0
        if cell not in self._ours:
            setting = BenchSetting(cell.exchange_text, cell.link.workers, cell.n, cell.encrypted)
            self._ours[cell] = self._groups.enter_context(start_group(setting, self._hosts, folder))
            warmup = effort.warmup
        return [_measure_once(self._ours[cell]) for _ in range(warmup + repeats)][warmup:]


def _measure_once(group: BenchGroup) -> Sample:
    group.wait()
    began_s, before_s = time.monotonic(), _busy_s()
    repeat = group.repeat()
    after_s, cores_s = _busy_s(), (time.monotonic() - began_s) * (os.cpu_count() or 1)
    use = (after_s - before_s) / cores_s if before_s is not None and after_s is not None else None
    return sample_of(repeat, use)


def _busy_s() -> float | None:
    """Return the busy seconds of all cores, with those that the hypervisor took; None if unknown."""
    try:
        text = Path("/proc/stat").read_text(encoding="ascii")
    except OSError:
        return None
    user, nice, system, _, _, irq, soft, steal = text.split(maxsplit=9)[1:9]
    return sum(map(int, (user, nice, system, irq, soft, steal))) / os.sysconf("SC_CLK_TCK")


def sample_of(repeat: ExchangeSample, machine_use: float | None) -> Sample:
    return Sample(
        seconds=repeat.seconds,
        cpu_s=fmean(repeat.cpu_s),
        sent_bytes=fmean(repeat.sent_bytes),
        payload_bytes=sum(repeat.payload_bytes) / max(1, sum(repeat.payloads)),
        workspace_s=fmean(repeat.workspace_s),
        prepare_s=fmean(repeat.prepare_s),
        prepare_cpu_s=fmean(repeat.prepare_cpu_s),
        aborts=repeat.aborts,
        machine_use=machine_use,
    )
