"""What a coordinator that starts again knows from its journal (commit rule 11).

Decides nothing: it reads the entries that `Membership` wrote as `Journal` effects, in their order.
The latest VIEW binds, whether or not a member has seen it: who comes back is told it, then frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger
from gridtrain_coordinator.run.events import RunPhase

StateId = tuple[int, bytes, m.LedgerState]
"""Step, history, and the ledger with which the run goes on from there."""


@dataclass(frozen=True, slots=True)
class RecoveredRun:
    """The run as the journal left it.

    Attributes:
        reference: what all workers must agree with; None: no worker had come yet.
        generation: the latest; 0: none was made.
        view, roster: what its members were to be told, which binds; None, (): nobody held the model.
        started: a generation has trained, so that somebody holds a model worth waiting for.
        reached: where nobody held the model any more: steps that had been committed.
        checkpoints: of a model in stages: which ones most members told of, and the digests of their stages
            (`protocol.witnesses`).
    """

    definition: m.Setup | None
    generation: int
    view: m.MembershipView | None
    roster: tuple[m.Member, ...]
    has_started: bool
    is_finished: bool
    highest_step: int = 0
    checkpoints: Mapping[StateId, Mapping[m.Span, Iterable[bytes]]] = field(default_factory=dict)


def recover_run(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> RecoveredRun:
    """Raises `KeyError`, `TypeError` or `ValueError` for entries that no coordinator wrote."""
    reference: m.Setup | None = None
    latest: Mapping[str, Any] | None = None
    state, started, reached = "", False, 0
    known: dict[StateId, Mapping[m.Span, Iterable[bytes]]] = {}
    for kind, body in entries:
        match kind:
            case "run":
                facts = tuple((str(name), str(text)) for name, text in dict(body["facts"]).items())
                spec = m.LedgerSpec(**body["ledger"])
                model = _model(body["model"]) if body.get("model") else None
                stages = body.get("stages", 1)
                reference = m.Setup(facts, spec, 0, body["global_batch_size"], stages=stages, model=model)
            case "generation":
                latest, state = body, ""
            case "state" if "checkpoint" in body:  # the run's state is what it was
                told = body["checkpoint"]
                at = told["step"] - 1, bytes.fromhex(told["digest"]), parse_ledger(told["ledger"])
                known[at] = {m.Span(*span): [bytes.fromhex(d) for d in them] for span, them in told["blocks"]}
            case "state":
                state, reached = body["state"], int(body.get("reached", 0))
                started = state != RunPhase.WAITING and (started or state == RunPhase.TRAINING)
                if "rollback" in body:
                    known = {at: them for at, them in known.items() if at[0] < int(body["rollback"]["to"])}
    if latest is None:
        return RecoveredRun(reference, 0, None, (), False, False)
    view, roster = _view(latest)
    if state == RunPhase.WAITING:
        return RecoveredRun(reference, view.generation, None, (), False, False, reached, known)
    finished = state == RunPhase.FINISHED
    return RecoveredRun(reference, view.generation, view, roster, started, finished, checkpoints=known)


def checkpoint_entry(state: StateId, digests: Mapping[m.Span, Collection[bytes]]) -> dict[str, Any]:
    """What the journal says of a checkpoint that most members have told of; a later entry replaces it."""
    applied, history, ledger = state
    blocks = [[[span.start, span.stop], sorted(d.hex() for d in them)] for span, them in digests.items()]
    return {"step": applied + 1, "digest": history.hex(), "ledger": ledger_entry(ledger), "blocks": blocks}


def generation_entry(view: m.MembershipView, roster: Sequence[m.Member]) -> dict[str, Any]:
    """The journal's entry for a generation; JSON-able, and enough for `recover`."""
    return {
        "term": view.term,
        "generation": view.generation,
        "step": view.applied + 1,
        "verdict": view.verdict.name,
        "decided": asdict(view.decided_round) if view.decided_round is not None else None,
        "digest": view.history.hex(),
        "members": [
            {
                **asdict(member),
                "peer": member.peer.hex(),
                "digest": member.digest.hex(),
                "piece_digests": [digest.hex() for digest in member.piece_digests],
            }
            for member in roster
        ],
        "ledger": ledger_entry(view.ledger),
        "reason": view.reason,
        "exchange": view.exchange,
        "cuts": list(view.stage_bounds),
    }


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
