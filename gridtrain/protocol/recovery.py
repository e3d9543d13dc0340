"""What a coordinator that starts again knows from its journal (commit rule 11).

Decides nothing: it reads the entries that `Membership` wrote as `Journal` effects, in their order.
The latest VIEW binds, whether or not a member has seen it: who comes back is told it, then frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gridtrain.protocol import messages as m
from gridtrain.protocol.membership_io import RunPhase


@dataclass(frozen=True, slots=True)
class Recovered:
    """The run as the journal left it.

    Attributes:
        reference: what all workers must agree with; None: no worker had come yet.
        generation: the latest; 0: none was made.
        view, roster: what its members were to be told, which binds; None, (): nobody held the model.
        started: a generation has trained, so that somebody holds a model worth waiting for.
        reached: where nobody held the model any more: steps that had been committed.
    """

    reference: m.Setup | None
    generation: int
    view: m.View | None
    roster: tuple[m.Member, ...]
    started: bool
    finished: bool
    reached: int = 0


def recover(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> Recovered:
    """Raises `KeyError`, `TypeError` or `ValueError` for entries that no coordinator wrote."""
    reference: m.Setup | None = None
    latest: Mapping[str, Any] | None = None
    state, started, reached = "", False, 0
    for kind, body in entries:
        match kind:
            case "run":
                facts = tuple((str(name), str(text)) for name, text in dict(body["facts"]).items())
                spec = m.LedgerSpec(**body["ledger"])
                reference = m.Setup(facts, spec, 0, body["global_batch_size"])
            case "generation":
                latest, state = body, ""
            case "state":
                state, reached = body["state"], int(body.get("reached", 0))
                started = state != RunPhase.WAITING and (started or state == RunPhase.TRAINING)
    if latest is None:
        return Recovered(reference, 0, None, (), False, False)
    view, roster = _view(latest)
    if state == RunPhase.WAITING:
        return Recovered(reference, view.generation, None, (), False, False, reached)
    return Recovered(reference, view.generation, view, roster, started, state == RunPhase.FINISHED)


def generation_entry(view: m.View, roster: Sequence[m.Member]) -> dict[str, Any]:
    """The journal's entry for a generation; JSON-able, and enough for `recover`."""
    return {
        "term": view.term,
        "generation": view.generation,
        "step": view.applied + 1,
        "verdict": view.verdict.name,
        "decided": asdict(view.decided) if view.decided is not None else None,
        "digest": view.history.hex(),
        "members": [{**asdict(member), "peer": member.peer.hex()} for member in roster],
        "ledger": ledger_entry(view.ledger),
        "reason": view.reason,
    }


def _view(body: Mapping[str, Any]) -> tuple[m.View, tuple[m.Member, ...]]:
    roster = tuple(m.Member(**{**line, "peer": bytes.fromhex(line["peer"])}) for line in body["members"])
    view = m.View(
        term=body["term"],
        generation=body["generation"],
        world_size=len(roster),
        verdict=m.Verdict[body["verdict"]],
        decided=m.RoundId(**body["decided"]) if body["decided"] is not None else None,
        applied=body["step"] - 1,
        history=bytes.fromhex(body["digest"]),
        ledger=ledger_of(body["ledger"]),
        reason=body["reason"],
    )
    return view, roster


def ledger_entry(state: m.LedgerState) -> dict[str, Any]:
    """JSON-able, for journals and checkpoints; `ledger_of` reads it back."""
    body = asdict(state)
    if state.holders is not None:
        body["holders"] = [[peer.hex(), [asdict(s) for s in spans]] for peer, spans in state.holders]
    return body


def ledger_of(body: Mapping[str, Any]) -> m.LedgerState:
    """Raises `KeyError`, `TypeError` or `ValueError` for what `ledger_entry` did not make."""
    holders = body["holders"]
    named = None
    if holders is not None:
        named = tuple((bytes.fromhex(peer), _spans(spans)) for peer, spans in holders)
    return m.LedgerState(**{**body, "requeued": _spans(body["requeued"]), "holders": named})


def _spans(lines: Iterable[Mapping[str, int]]) -> tuple[m.Span, ...]:
    return tuple(m.Span(**line) for line in lines)
