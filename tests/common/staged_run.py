"""A coordinator's core with workers of a model in stages whose messages a test chooses.

Time advances by one virtual second for each event.
"""

from __future__ import annotations

from dataclasses import replace

from scripted_coordinator import SETUP, ScriptedCoordinator, sent

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain_coordinator.run.events import Effect, PeerDisconnected
from gridtrain_coordinator.run.journal_recovery import RecoveredRun

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
SIX_LAYERS = m.StagedModel((0, 2, 4, 6), (m.LayerCosts(1, 1),) * 6, copies=1.0, micro_batches=8)


def state_after(step: int) -> m.LedgerState:
    """Steps of 4 samples each."""
    return m.LedgerState(step=step + 1, cursor=4 * (step + 1), consumed=4 * (step + 1))


def stored(step: int, *stages: int, history: bytes = b"", digest: str = "") -> tuple[m.CheckpointInfo, ...]:
    """`digest`: "x" makes b"x0" of stage 0, b"x1" of stage 1; each stage is one layer."""
    name, state = history or b"h%d" % step, state_after(step)
    return tuple(
        m.CheckpointInfo(step, name, state, m.Span(s, s + 1), f"{digest}{s}".encode() if digest else b"")
        for s in stages
    )


class StagedRun(ScriptedCoordinator):
    """Workers are keys of 32 equal letters, and are called by that letter.

    Args:
        stages: of the model.
        peers: workers that join at once; with `start` they are ready as soon as they have a generation.
        kept: checkpoints of a worker, by its key; `memory`: bytes that it declares.
    """

    def __init__(
        self,
        stages: int,
        *peers: m.PeerId,
        start: bool = True,
        kept: dict[m.PeerId, tuple[m.CheckpointInfo, ...]] | None = None,
        model: m.StagedModel | None = None,
        memory: dict[m.PeerId, int] | None = None,
        recovered: RecoveredRun | None = None,
        term: int = 1,
    ) -> None:
        limits = Deadlines(silence_s=1e9, settle_s=0.0, report_s=100.0, generation_gap_s=0.0)
        super().__init__(limits=limits, min_workers=len(peers) or 1, term=term, recovered=recovered)
        self.setup = replace(SETUP, stages=stages, model=model)
        self.memory = memory or {}
        self.checkpoints = kept or {}
        for peer in peers:
            self.join(peer)
        if start and self.core.run.view is not None:
            self.ready()

    def join(self, peer: m.PeerId) -> list[Effect]:
        """Join; a worker of the latest generation has its state."""
        setup = replace(
            self.setup,
            stage_checkpoints=self.checkpoints.get(peer, ()),
            memory_bytes=self.memory.get(peer, 0),
        )
        return super().join(peer, generation=self.core.generation, setup=setup)

    def lose(self, peer: m.PeerId) -> list[Effect]:
        """Its connection broke and was not restored."""
        effects = self.hear(PeerDisconnected(peer, "died"))
        return effects + self.tick(self.core.run.limits.regreet_s)

    def ready(self, *peers: m.PeerId) -> None:
        """All members, or these, are ready."""
        super().ready(*(peers or [member.peer for member in self.core.run.member_list]))

    def report(
        self,
        *peers: m.PeerId,
        applied: int | None = None,
        history: bytes | None = None,
        ledger: m.LedgerState | None = None,
        prepared: m.RoundId | None = None,
        digest: bytes = b"",
    ) -> None:
        """Each reports its rank's stage, after the view's step or `applied`."""
        view = self.view
        for peer in peers:
            report = m.FreezeReport(
                self.core.term, self.core.generation, True,
                view.applied if applied is None else applied,
                view.history if history is None else history,
                view.ledger if ledger is None else ledger,
                prepared, digest, 0, self.layers_of(peer),
            )  # fmt: skip
            self.say(peer, report)

    def stage_of(self, peer: m.PeerId) -> int:
        order = [member.peer for member in self.core.run.member_list]
        return RankLayout.for_world_size(len(self.core.run.partition.bounds) - 1, len(order)).stage_of(
            order.index(peer)
        )

    def layers_of(self, peer: m.PeerId) -> m.Span:
        stage = self.stage_of(peer)
        return m.Span(*self.core.run.partition.bounds[stage : stage + 2])

    @property
    def standbys(self) -> str:
        return " ".join(worker.name for worker in self.core.run.workers.values() if worker.standby_reason)

    def last_sent(self, peer: m.PeerId, kind: type[m.Message]) -> list[m.Message]:
        """Messages of a kind to a worker in the latest effects."""
        return sent(self.effects, kind, peer)


def repartitioned_without_b() -> StagedRun:
    """a holds [0 2), c [4 6) and a copy of b's [2 4): two of three stages are left, [0 3) and [3 6)."""
    has = {A: [m.Span(0, 2)], B: [m.Span(2, 4)], C: [m.Span(2, 4), m.Span(4, 6)]}
    kept = {
        peer: tuple(m.CheckpointInfo(9, b"h", state_after(9), x, bytes([x.start]) * 32) for x in spans)
        for peer, spans in has.items()
    }
    run = StagedRun(3, A, B, C, model=SIX_LAYERS, kept=kept)
    run.lose(B)
    run.report(A, C)
    run.tick(run.core.run.limits.recut_s)
    assert run.view.stage_bounds == (0, 3, 6)
    return run
