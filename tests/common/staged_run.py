"""A coordinator's core with workers of a model in stages that do as they are told, for tests.

Decides nothing; time passes one virtual second after the other.
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Effect,
    Event,
    LogEvent,
    MessageReceived,
    PeerDisconnected,
    Send,
)
from gridtrain_coordinator.run.journal_recovery import RecoveredRun

ME = b"0" * 32


class StagedRun:
    """Workers are keys of 32 equal letters, and are called by that letter.

    Args:
        stages: of the model.
        peers: who joins at once; with `start` they are READY as soon as they have a generation.
        kept: checkpoints that a worker brings, by its key; `memory`: bytes that it declares.
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
        self.core = Membership(
            me=ME, run="r", term=term, deadlines=limits, software="", min_workers=len(peers) or 1,
            recovered=recovered,
        )  # fmt: skip
        facts, spec = (("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1)
        self.setup = m.Setup(facts, spec, 4, None, stages=stages, model=model)
        self.memory = memory or {}
        self.now_s = 0.0
        self.checkpoints = kept or {}
        self.effects: list[Effect] = []
        self.seen: list[Effect] = []
        self.core.start(self.now_s)
        for peer in peers:
            self.join(peer)
        if start and self.core.run.view is not None:
            self.ready()

    def handle(self, event: Event) -> list[Effect]:
        self.now_s += 1.0
        self.effects = self.core.handle(event, self.now_s)
        self.seen += self.effects
        return self.effects

    def receive(self, peer: m.PeerId, message: m.Message) -> list[Effect]:
        return self.handle(MessageReceived(peer, message))

    def join(self, peer: m.PeerId) -> list[Effect]:
        name = peer[:1].decode()
        setup = m.Setup(
            self.setup.facts, self.setup.ledger, 4, None, stages=self.setup.stages,
            stage_checkpoints=self.checkpoints.get(peer, ()),
            model=self.setup.model,
            memory_bytes=self.memory.get(peer, 0),
        )  # fmt: skip
        generation = self.core.generation  # whoever was in it has it
        effects = self.receive(peer, m.Join("r", name, "memory://" + name, True, generation > 0, generation))
        effects += self.handle(DialBackResult(peer, "memory://" + name))
        return effects + self.receive(peer, setup) + self.receive(peer, m.LinkLatencies(()))

    def lose(self, peer: m.PeerId) -> list[Effect]:
        """Its connection broke and did not come back."""
        effects = self.handle(PeerDisconnected(peer, "died"))
        self.now_s += self.core.run.limits.regreet_s
        self.effects = self.core.tick(self.now_s)
        self.seen += self.effects
        return effects + self.effects

    def ready(self, *peers: m.PeerId) -> None:
        """All members, or these."""
        view = self.core.run.view
        assert view is not None
        for peer in peers or [member.peer for member in self.core.run.member_list]:
            self.receive(peer, m.Ready(self.core.term, self.core.generation, view.history))

    def report(
        self,
        *peers: m.PeerId,
        applied: int | None = None,
        history: bytes | None = None,
        ledger: m.LedgerState | None = None,
        prepared: m.RoundId | None = None,
        digest: bytes = b"",
    ) -> None:
        """Each holds its seat's stage, after the View's step or `applied`."""
        view = self.core.run.view
        assert view is not None
        for peer in peers:
            report = m.FreezeReport(
                self.core.term, self.core.generation, True,
                view.applied if applied is None else applied,
                view.history if history is None else history,
                view.ledger if ledger is None else ledger,
                prepared, digest, 0, self.layers_of(peer),
            )  # fmt: skip
            self.receive(peer, report)

    def stage_of(self, peer: m.PeerId) -> int:
        order = [member.peer for member in self.core.run.member_list]
        return RankLayout.for_world_size(len(self.core.run.partition.bounds) - 1, len(order)).stage_of(
            order.index(peer)
        )

    def layers_of(self, peer: m.PeerId) -> m.Span:
        stage = self.stage_of(peer)
        return m.Span(*self.core.run.partition.bounds[stage : stage + 2])

    @property
    def roster(self) -> str:
        return " ".join(member.name for member in self.core.run.member_list)

    @property
    def standbys(self) -> str:
        return " ".join(worker.name for worker in self.core.run.workers.values() if worker.standby_reason)

    def last_sent(self, peer: m.PeerId, kind: type[m.Message]) -> list[m.Message]:
        """Of the latest answer."""
        sends = [effect for effect in self.effects if isinstance(effect, Send) and effect.peer == peer]
        return [effect.message for effect in sends if isinstance(effect.message, kind)]

    def notes(self, event: str) -> list[LogEvent]:
        return [effect for effect in self.seen if isinstance(effect, LogEvent) and effect.event == event]
