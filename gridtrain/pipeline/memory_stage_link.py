"""A pipeline inside one process: a `Line` for each stage, over memory, with latency and rate if wanted.

Decides when a payload is there; never copies one.  For tests, notebooks and for trying out a cut, with a
thread for each stage.

    stage 0  ==[ full-duplex link: bandwidth_Bps, then latency_s ]==  stage 1  ==[ ... ]==  stage 2

Each direction between each two stages is a link of its own: payloads follow one another at `bandwidth_Bps`
and each arrives `latency_s` after it has left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from gridtrain.core.messages import Channel
from gridtrain.errors import LineBroken, LocalProtocolError
from gridtrain.pipeline.executor import PayloadBuffers

T = TypeVar("T")


class _SharedChannel:
    """What all lines of one pipeline share."""

    def __init__(self, stages: int, latency_s: float, bandwidth_Bps: float | None) -> None:
        self.stages, self.latency_s, self.bandwidth_Bps = stages, latency_s, bandwidth_Bps
        self.lock = threading.Lock()
        self.arrived = [threading.Condition(self.lock) for _ in range(stages)]  # each wakes one stage alone
        self.arriving: dict[tuple[int, int, Channel], tuple[float, PayloadBuffers]] = {}
        self.free_s: dict[tuple[int, int], float] = {}
        self.broken: tuple[str, int | None] | None = None

    def arrival_s(self, source: int, to: int, payload_bytes: int) -> float:
        now_s = time.monotonic()
        if self.bandwidth_Bps is None:
            return now_s + self.latency_s
        left_s = max(now_s, self.free_s.get((source, to), 0.0)) + payload_bytes / self.bandwidth_Bps
        self.free_s[source, to] = left_s
        return left_s + self.latency_s


class MemoryStageLink:
    """One stage's end; make all of a pipeline with `memory_lines`."""

    def __init__(self, wires: _SharedChannel, stage: int) -> None:
        self._wires, self.stage = wires, stage

    def send(self, stage: int, channel: Channel, buffers: PayloadBuffers) -> None:
        wires = self._wires
        with wires.lock:
            self._check_not_broken()
            key = (self.stage, stage, channel)
            if key in wires.arriving or not 0 <= stage < wires.stages or stage == self.stage:
                raise LocalProtocolError(f"stage {self.stage} cannot send {channel} to stage {stage} (again)")
            payload_bytes = sum(buffer.nbytes for buffer in buffers)
            wires.arriving[key] = (wires.arrival_s(self.stage, stage, payload_bytes), list(buffers))
            wires.arrived[stage].notify_all()

    def receive(self, stage: int, channel: Channel) -> PayloadBuffers:
        wires, key = self._wires, (stage, self.stage, channel)
        with wires.lock:
            while True:
                self._check_not_broken()
                found = wires.arriving.get(key)
                if found is None:
                    wires.arrived[self.stage].wait()
                    continue
                missing_s = found[0] - time.monotonic()
                if missing_s <= 0:
                    return wires.arriving.pop(key)[1]
                wires.arrived[self.stage].wait(missing_s)

    def abort(self, reason: str) -> None:
        """Every stage's next or present call raises `LineBroken`; the first reason stays."""
        with self._wires.lock:
            if self._wires.broken is None:
                self._wires.broken = (reason, self.stage)
            for arrived in self._wires.arrived:
                arrived.notify_all()

    def _check_not_broken(self) -> None:
        if self._wires.broken is not None:
            raise LineBroken(*self._wires.broken)


def memory_stage_links(
    stages: int, *, latency_s: float = 0.0, bandwidth_Bps: float | None = None
) -> tuple[MemoryStageLink, ...]:
    """The lines of one attempt, one for each stage."""
    wires = _SharedChannel(stages, latency_s, bandwidth_Bps)
    return tuple(MemoryStageLink(wires, stage) for stage in range(stages))


def run_in_threads(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each in a thread of its own and wait for all; raises what failed.

    Where one stage's fault breaks the others' lines, the fault comes out, not the broken lines.
    """
    results: dict[int, T] = {}
    failed: list[BaseException] = []

    def run(i: int, work: Callable[[], T]) -> None:
        try:
            results[i] = work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i, work), daemon=True) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((error for error in failed if not isinstance(error, LineBroken)), failed[0])
    return [results[i] for i in range(len(works))]
