"""Reads the run back from the journal after a restart (commit rule 11), and builds the journal's entries.

The entries are those of the `JournalEntry` effects, in order.  The latest view is binding, whether or not any
member has received it: members that come back receive the view and are then frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger, parse_spec
from gridtrain_coordinator.run.events import RunPhase

StateId = tuple[int, bytes, m.LedgerState]
"""A state of the run: its step, its history, and the ledger with which the run continues from that step."""


@dataclass(frozen=True, slots=True)
class LeftWorker:
    """A worker that left or was paused, with the stage checkpoints on its disk."""

    name: str
    checkpoints: tuple[m.CheckpointInfo, ...]


@dataclass(slots=True)
class RecoveredRun:
    """The run according to the journal; the defaults correspond to an empty journal.

    Attributes:
        definition: the setup that every worker's setup must match; None if no worker has joined yet.
        generation: the latest generation; 0 if none was installed.
        view, roster: the view and members of the latest generation; None and () if no worker held the model
            when the journal ended.
        has_committed: whether a step may have been committed.
        has_started: whether a generation has trained; if so, a worker holds a model worth waiting for.
        is_ending: whether the owner has ended the run.
        end_reason: why the run is finished and, if its model was not written, why not; None if
            the run is not finished.
        highest_step: the number of committed steps when the run was paused, when no worker held the model any
            longer, or when a worker left with checkpoints; 0 if none of these followed the latest generation.
        checkpoints: the confirmed checkpoints of a pipeline, with the digests of their stages
            (`CheckpointQuorum`).
        latest_members: the members of the latest generation, even if no worker holds the model.
        names: the latest names of all members, including those that have left.
        left_workers: by key, the workers that have left with checkpoints since the latest generation, and
            have not come back.
    """

    definition: m.Setup | None = None
    generation: int = 0
    view: m.MembershipView | None = None
    roster: tuple[m.Member, ...] = ()
    has_committed: bool = False
    has_started: bool = False
    is_ending: bool = False
    end_reason: str | None = None
    highest_step: int = 0
    checkpoints: dict[StateId, Mapping[m.Span, Iterable[bytes]]] = field(default_factory=dict)
    names: dict[m.PeerId, str] = field(default_factory=dict)
    left_workers: dict[m.PeerId, LeftWorker] = field(default_factory=dict)
    left_step: int = 0
    latest_members: frozenset[m.PeerId] = frozenset()

    @property
    def is_finished(self) -> bool:
        return self.end_reason is not None


def recover_run(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> RecoveredRun:
    """Return the run that these entries of the journal describe.

    Raises `KeyError`, `TypeError` or `ValueError` for invalid entries.
    """
    run, latest, phase, reason = RecoveredRun(), None, "", ""
    for kind, body in entries:
        match kind:
            case "run":
                run.definition = _definition(body)
            case "compacted":
                run.names = {bytes.fromhex(peer): str(name) for peer, name in body["names"]}
            case "generation":
                latest, phase = body, ""
                run.highest_step, run.left_workers, run.left_step = 0, {}, 0
                for line in body["members"]:
                    peer = bytes.fromhex(line["peer"])
                    run.names.pop(peer, None)  # reinserted, so that the latest names come last
                    run.names[peer] = str(line["name"])
            case "state" if "checkpoint" in body:  # the phase has not changed
                at, digests = _confirmed_checkpoint(body["checkpoint"])
                run.checkpoints[at] = digests
            case "state" if "left" in body:  # the phase has not changed
                entry = body["left"]
                peer = bytes.fromhex(entry["peer"])
                run.left_workers.pop(peer, None)
                if stored := tuple(map(_stage_checkpoint, entry["checkpoints"])):
                    run.left_workers[peer] = LeftWorker(str(entry["name"]), stored)
                run.highest_step = max(run.highest_step, int(body.get("reached", 0)))
            case "state" if "ending" in body:  # the phase has not changed
                run.is_ending = True
            case "state":
                phase, run.highest_step = body["state"], int(body.get("reached", 0))
                run.left_step = int(body.get("left_step", 0))
                reason = "; ".join(text for text in (body.get("reason"), body.get("missing_model")) if text)
                run.has_committed = bool(body.get("committed", run.highest_step > 0))
                has_started = run.has_started or phase == RunPhase.TRAINING
                run.has_started = phase != RunPhase.WAITING and has_started
                if "rollback" in body:
                    step = int(body["rollback"]["to"])
                    run.checkpoints = {at: known for at, known in run.checkpoints.items() if at[0] < step}
    run.end_reason = reason if phase == RunPhase.FINISHED else None
    if latest is None:
        return RecoveredRun(run.definition, is_ending=run.is_ending, end_reason=run.end_reason)
    view, roster = _view(latest)
    run.generation, run.latest_members = view.generation, frozenset(member.peer for member in roster)
    if phase != RunPhase.WAITING:
        run.view, run.roster, run.has_committed = view, roster, True
    return run


def is_same_run(one: RecoveredRun, other: RecoveredRun) -> bool:
    """Return whether two runs are equal, including the order of names, workers and checkpoints."""

    def ordered(run: RecoveredRun) -> tuple[object, ...]:
        return run, list(run.names), list(run.left_workers), list(run.checkpoints)

    return ordered(one) == ordered(other)


class SupersededEntries:
    """Finds the entries without which `recover_run` returns the same run, while the entries are read.

    These are all generations except the latest and, among the entries before the latest generation, the
    reports of workers that left and all phases except the last that says whether the run has started.  The
    names of earlier members would be lost with these entries, so `compacted_entry` contains the names.

    Attributes:
        ids: the numbers of these entries.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._generation: int | None = None
        self._deciding: int | None = None  # the latest entry that says whether the run has started
        self._states: list[int] = []  # entries that the next generation supersedes

    def add(self, number: int, kind: str, body: Mapping[str, Any]) -> None:
        """Consider the next entry, which must be valid."""
        if kind == "generation":
            self.ids += [*self._states, *([] if self._generation is None else [self._generation])]
            self._generation, self._states = number, []
        elif kind == "state" and "left" in body:
            self._states.append(number)
        elif kind == "state" and not body.keys() & {"checkpoint", "ending", "rollback"}:
            superseded: int | None = number
            if body["state"] in (RunPhase.WAITING, RunPhase.TRAINING):
                self._deciding, superseded = number, self._deciding
            self._states += [] if superseded is None else [superseded]


def compacted_entry(recovered: RecoveredRun) -> dict[str, Any]:
    """Return the part of the run that the first entry of a compacted journal must contain."""
    return {"names": [[peer.hex(), name] for peer, name in recovered.names.items()]}


def checkpoint_entry(state: StateId, digests: Mapping[m.Span, Collection[bytes]]) -> dict[str, Any]:
    """Return the journal entry for a confirmed checkpoint; it replaces earlier entries for the same state."""
    applied, history, ledger = state
    blocks = [[[span.start, span.stop], sorted(d.hex() for d in them)] for span, them in digests.items()]
    return {"step": applied + 1, "digest": history.hex(), "ledger": ledger_entry(ledger), "blocks": blocks}


def left_entry(peer: m.PeerId, left: LeftWorker) -> dict[str, Any]:
    """Return the journal entry for a worker that left.

    An entry without checkpoints cancels an earlier entry for the same worker.
    """
    checkpoints = [
        {
            "step": x.applied + 1,
            "digest": x.history.hex(),
            "ledger": ledger_entry(x.ledger),
            "blocks": [x.layers.start, x.layers.stop],
            "content": x.digest.hex(),
        }
        for x in left.checkpoints
    ]
    return {"peer": peer.hex(), "name": left.name, "checkpoints": checkpoints}


def generation_entry(view: m.MembershipView, roster: Sequence[m.Member]) -> dict[str, Any]:
    """Return the journal entry for a generation as a JSON-serializable dictionary."""
    return {
        "term": view.term,
        "generation": view.generation,
        "step": view.applied + 1,
        "verdict": view.verdict.name,
        "decided": asdict(view.decided_round) if view.decided_round is not None else None,
        "digest": view.history.hex(),
        "members": [_member_entry(member) for member in roster],
        "ledger": ledger_entry(view.ledger),
        "reason": view.reason,
        "exchange": view.exchange,
        "cuts": list(view.stage_bounds),
    }


_MEMBER_FIELDS = [each.name for each in fields(m.Member)]


def _member_entry(member: m.Member) -> dict[str, Any]:
    """Return a member's journal record.

    The share of entries is omitted if it is full, because older versions cannot read this field.
    """
    entry = {
        **{name: getattr(member, name) for name in _MEMBER_FIELDS},  # `asdict` takes ten times as long
        "peer": member.peer.hex(),
        "pieces": [[asdict(layers), rank] for layers, rank in member.pieces],
        "digest": member.digest.hex(),
        "piece_digests": [digest.hex() for digest in member.piece_digests],
    }
    if member.entries_share == m.WHOLE_SHARE:
        del entry["entries_share"]
    return entry


def _definition(body: Mapping[str, Any]) -> m.Setup:
    facts = tuple((str(name), str(text)) for name, text in dict(body["facts"]).items())
    model = _model(body["model"]) if body.get("model") else None
    spec, stages = parse_spec(body["ledger"]), body.get("stages", 1)
    return m.Setup(facts, spec, 0, body["global_batch_size"], stages=stages, model=model)


def _confirmed_checkpoint(entry: Mapping[str, Any]) -> tuple[StateId, dict[m.Span, list[bytes]]]:
    digests = {m.Span(*span): [bytes.fromhex(text) for text in them] for span, them in entry["blocks"]}
    return (entry["step"] - 1, bytes.fromhex(entry["digest"]), parse_ledger(entry["ledger"])), digests


def _stage_checkpoint(line: Mapping[str, Any]) -> m.CheckpointInfo:
    history, content = bytes.fromhex(line["digest"]), bytes.fromhex(line["content"])
    ledger = parse_ledger(line["ledger"])
    return m.CheckpointInfo(line["step"] - 1, history, ledger, m.Span(*line["blocks"]), content)


def _model(body: Mapping[str, Any]) -> m.StagedModel:
    blocks = tuple(m.LayerCosts(**block) for block in body["blocks"])
    return m.StagedModel(**{**body, "cuts": tuple(body["cuts"]), "blocks": blocks})


def _member(line: Mapping[str, Any]) -> m.Member:
    pieces = tuple((m.Span(**blocks), int(rank)) for blocks, rank in line.get("pieces", ()))
    peer, digest = bytes.fromhex(line["peer"]), bytes.fromhex(line.get("digest", ""))
    told = [bytes.fromhex(text) for text in line.get("piece_digests", ())]
    digests = tuple(told or [b""] * len(pieces))
    known = {"peer": peer, "digest": digest, "pieces": pieces, "piece_digests": digests}
    return m.Member(**{**line, **known})


def _view(body: Mapping[str, Any]) -> tuple[m.MembershipView, tuple[m.Member, ...]]:
    roster = tuple(_member(line) for line in body["members"])
    view = m.MembershipView(
        term=body["term"],
        generation=body["generation"],
        world_size=len(roster),
        verdict=m.Verdict[body["verdict"]],
        decided_round=m.RoundId(**body["decided"]) if body["decided"] is not None else None,
        applied=body["step"] - 1,
        history=bytes.fromhex(body["digest"]),
        ledger=parse_ledger(body["ledger"]),
        reason=body["reason"],
        exchange=body.get("exchange", ""),
        stage_bounds=tuple(body.get("cuts", ())),
    )
    return view, roster
