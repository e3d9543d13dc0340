"""A pipeline inside one process: a link for each stage over memory, with latency and rate if wanted.

For tests, notebooks and for trying out a partition, with a thread for each stage.

    stage 0  ==[ full-duplex link: bandwidth_Bps, then latency_s ]==  stage 1  ==[ ... ]==  stage 2

Each direction between two stages is a separate link: payloads follow one another at `bandwidth_Bps`, and each
arrives `latency_s` after it was sent.
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
    """State that all links of one pipeline share."""

    def __init__(self, stages: int, latency_s: float, bandwidth_Bps: float | None) -> None:
        self.stages, self.latency_s, self.bandwidth_Bps = stages, latency_s, bandwidth_Bps
        self.lock = threading.Lock()
        self.arrived = [threading.Condition(self.lock) for _ in range(stages)]  # each wakes one stage
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
    """One stage's end of the links; `memory_stage_links` makes those of a pipeline."""

    def __init__(self, shared: _SharedChannel, stage: int) -> None:
        self._shared, self.stage = shared, stage

    def send(self, stage: int, channel: Channel, buffers: PayloadBuffers) -> None:
        shared = self._shared
        with shared.lock:
            self._check_not_broken()
            key = (self.stage, stage, channel)
            if key in shared.arriving or not 0 <= stage < shared.stages or stage == self.stage:
                raise LocalProtocolError(f"stage {self.stage} cannot send {channel} to stage {stage} (again)")
            payload_bytes = sum(buffer.nbytes for buffer in buffers)
            shared.arriving[key] = (shared.arrival_s(self.stage, stage, payload_bytes), list(buffers))
            shared.arrived[stage].notify_all()

    def receive(self, stage: int, channel: Channel) -> PayloadBuffers:
        shared, key = self._shared, (stage, self.stage, channel)
        with shared.lock:
            while True:
                self._check_not_broken()
                found = shared.arriving.get(key)
                if found is None:
                    shared.arrived[self.stage].wait()
                    continue
                missing_s = found[0] - time.monotonic()
                if missing_s <= 0:
                    return shared.arriving.pop(key)[1]
                shared.arrived[self.stage].wait(missing_s)

    def abort(self, reason: str) -> None:
        """Make `send` and `receive` of all stages raise `LineBroken`; the first reason stays."""
        with self._shared.lock:
            if self._shared.broken is None:
                self._shared.broken = (reason, self.stage)
            for arrived in self._shared.arrived:
                arrived.notify_all()

    def _check_not_broken(self) -> None:
        if self._shared.broken is not None:
            raise LineBroken(*self._shared.broken)


def memory_stage_links(
    stages: int, *, latency_s: float = 0.0, bandwidth_Bps: float | None = None
) -> tuple[MemoryStageLink, ...]:
    """The links of one attempt, one for each stage."""
    shared = _SharedChannel(stages, latency_s, bandwidth_Bps)
    return tuple(MemoryStageLink(shared, stage) for stage in range(stages))


def run_in_threads(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each in a thread and wait for all; raises what failed.

    If one stage's error breaks the others' links, that error is raised, not `LineBroken`.
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
