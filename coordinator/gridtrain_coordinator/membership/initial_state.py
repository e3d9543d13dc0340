"""Who has built the very state with which a run begins, and so needs to be sent nothing.

Decides by the digests that workers tell in `Setup.begins`.  A digest is of all that a joining member would be
sent, bit for bit; never decides whose state the run begins with (the longest-serving worker's).

    anna   begins 3f..   the eldest: the run begins with 3f..
    bert   begins 3f..   holds it, too                              no byte of it is sent to him
    clara  begins 77..   another seed, or another kind of processor: joins, and is sent it
    dora   begins ""     was in the run before: joins

After the first committed step nobody has it any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain_coordinator.run.registry import Worker


class InitialState:
    """See the module's text."""

    def __init__(self) -> None:
        self._digest = b""  # of the state with which the run begins; empty: not known

    def begin_with(self, eldest: Worker, workers: Iterable[Worker]) -> frozenset[m.PeerId]:
        """The run begins with the eldest's: who of the workers holds that."""
        self._digest = _reported_digest(eldest)
        return self.holders(workers) | {eldest.peer}

    def holders(self, workers: Iterable[Worker]) -> frozenset[m.PeerId]:
        """Who of the workers has built what the run begins with; only before its first step is committed."""
        return frozenset(
            worker.peer for worker in workers if self._digest and _reported_digest(worker) == self._digest
        )

    def clear(self, workers: Iterable[Worker]) -> None:
        """A run was given up: who was in it has a model of that by now, whatever it told before."""
        self._digest = b""
        for worker in workers:
            if worker.setup is not None:
                worker.setup = replace(worker.setup, initial_state_digest=b"")


def _reported_digest(worker: Worker) -> bytes:
    return (
        worker.setup.initial_state_digest
        if worker.setup is not None and worker.setup.checkpoint is None
        else b""
    )
