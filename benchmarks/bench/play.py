"""Cells of the same link take turns: A B A B, so that a machine that slows down slows all of them.

Decides the order.  Ours stay alive between their turns, at a barrier; a rival is started anew for each block.

    link 1    ours A: r repeats | rival: r repeats | ours B: r repeats |   block 1
              ours A: r repeats | rival: r repeats | ours B: r repeats |   block 2
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

from bench import rivals_side
from bench.bounds import bound_s
from bench.cells import Cell, Link
from bench.ground import Namespaces, ground_of
from bench.results import CellResult, Sample
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.tools.bench.bench_group import BenchGroup, BenchSetting, ExchangeSample, LocalHost, start_group
from lab.ns import LabError

Say = Callable[[str], None]
TURN_S, MOST_REPEATS = 1.0, 10
VECTOR_BYTES = 16
"""For each element of a member's vector: gradient, scaled copy, residual and its second buffer, at most."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How often: `blocks` turns of at least `repeats`; the first `warmup` of a start are not counted."""

    blocks: int = 2
    repeats: int = 3
    warmup: int = 1
    loopback: bool = False

    def repeats_of(self, cell: Cell) -> int:
        """More of what is over soon, ours and rivals alike: about `TURN_S` a turn, were it at its bound."""
        least_s = bound_s(cell)
        return max(self.repeats, min(MOST_REPEATS, int(TURN_S / least_s))) if least_s else self.repeats


def by_link(cells: Sequence[Cell]) -> list[tuple[Link, list[Cell]]]:
    """In the order of first appearance; a cell that is named twice is measured once."""
    groups: dict[Link, list[Cell]] = {}
    for cell in cells:
        mine = groups.setdefault(cell.link, [])
        if cell not in mine:
            mine.append(cell)
    return list(groups.items())


def play(cells: Sequence[Cell], effort: Effort, reasons: Mapping[str, str], say: Say) -> Iterator[CellResult]:
    """Measure; each link's cells are handed out when it is done.  What cannot be measured says why."""
    for link, mine in by_link(cells):
        results = [CellResult(cell, bound_s(cell)) for cell in mine]
        for result in results:
            if result.cell.rival and (reason := rivals_side.why_not(result.cell, reasons)):
                result.skipped = reason
            elif result.cell.rival and effort.loopback:
                result.skipped = "rivals are measured in namespaces: they cannot limit themselves"
        runnable = [result for result in results if not result.skipped]
        try:
            for wave in _waves(runnable, half_of_the_memory()):
                _play_wave(link, wave, effort, say)
        except (ConfigError, LabError) as error:
            for result in runnable:
                result.skipped = result.skipped or ("" if result.samples else str(error))
        yield from results


def _waves(results: Sequence[CellResult], room_bytes: int) -> Iterator[list[CellResult]]:
    """Those of one size take turns with each other, as many at once as the memory is thought to hold."""
    for n in dict.fromkeys(result.cell.n for result in results):
        wave: list[CellResult] = []
        held_bytes = 0
        for result in (result for result in results if result.cell.n == n):
            size_bytes = 0 if result.cell.rival else VECTOR_BYTES * n * result.cell.link.workers
            if wave and held_bytes + size_bytes > room_bytes:
                yield wave
                wave, held_bytes = [], 0
            wave.append(result)
            held_bytes += size_bytes
        if wave:
            yield wave


def half_of_the_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _play_wave(link: Link, wave: Sequence[CellResult], effort: Effort, say: Say) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gridtrain-bench-") as folder,
        ground_of(link, loopback=effort.loopback) as ground,
        contextlib.ExitStack() as groups,
    ):
        stage = _Stage(ground, Path(folder), groups, effort)
        for block in range(effort.blocks):
            for result in wave:
                if result.skipped:
                    continue
                size = f"n = {result.cell.n:,}"
                say(f"{link}: {result.cell.label}, {size}, block {block + 1} of {effort.blocks}")
                try:
                    samples = stage.turn(result.cell)
                except (GridtrainError, LabError) as error:
                    result.skipped = f"failed: {error}"
                    say(f"{result.cell.label}: {result.skipped}")
                    continue
                result.samples += [replace(sample, block=block) for sample in samples]


class _Stage:
    """The hosts of a link, and our groups that live on them."""

    def __init__(
        self, ground: Namespaces | LocalHost, folder: Path, groups: contextlib.ExitStack, effort: Effort
    ) -> None:
        self._ground, self._folder, self._groups, self._effort = ground, folder, groups, effort
        self._numbers = itertools.count()
        self._ours: dict[Cell, BenchGroup] = {}

    def turn(self, cell: Cell) -> list[Sample]:
        """The repeats of one block.  Raises `GridtrainError`."""
        effort, number = self._effort, next(self._numbers)
        repeats = effort.repeats_of(cell)
        place = self._folder / str(number)
        if cell.rival:
            assert isinstance(self._ground, Namespaces)
            rival = rivals_side.RivalBlock(cell, self._ground, place, number)
            return rival.run(repeats, effort.warmup)
        warmup = 0
        if cell not in self._ours:
            setting = BenchSetting(cell.exchange_text, cell.link.workers, cell.n, cell.encrypted)
            self._ours[cell] = self._groups.enter_context(start_group(setting, self._ground, place))
            warmup = effort.warmup
        return [_one(self._ours[cell]) for _ in range(warmup + repeats)][warmup:]


def _one(group: BenchGroup) -> Sample:
    group.wait()
    began_s, before_s = time.monotonic(), _busy_s()
    repeat = group.repeat()
    after_s, cores_s = _busy_s(), (time.monotonic() - began_s) * (os.cpu_count() or 1)
    use = (after_s - before_s) / cores_s if before_s is not None and after_s is not None else None
    return sample_of(repeat, use)


def _busy_s() -> float | None:
    """Seconds that all cores have worked, or the machine's host has taken; None: this system says nothing."""
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
