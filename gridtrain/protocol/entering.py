"""A VIEW has come: which seat it gives this worker, and what the worker is and lacks in that generation.

Decides that once for each VIEW, and makes the `Generation`.  Never decides whether the VIEW counts
(`protocol.course`), and nothing that happens in the generation later.

    roster, cuts --> Seat           raises where no honest coordinator would have made it
    verdict      --> applied here, given up, or the state is lacking
    state        --> as it is in memory | put together from checkpoints | on its way from a donor | as built
                     a model that has followed since is none to begin with: Stop
    edges        --> let go, dial
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gridtrain.errors import JoinRefused, RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.generation import Generation
from gridtrain.protocol.lasting import Lasting
from gridtrain.protocol.member_io import Arrive, Effect, Enter, Note, Stop
from gridtrain.protocol.names import spoken
from gridtrain.protocol.recutting import cuts_of


def seat_of(me: m.PeerId, view: m.View, pages: Sequence[m.Roster], entered: Enter | None) -> Seat:
    """Raises `RemoteProtocolError`."""
    roster = tuple(member for page in pages for member in page.members)
    cuts = _cuts(view, entered)
    seat = Seat(me, view.term, view.generation, roster, max(1, len(cuts) - 1), view.exchange, cuts)
    choices = entered.choices if entered is not None else {}
    if len(roster) != view.world_size or seat.rank_of(me) is None:
        raise RemoteProtocolError(f"VIEW of {view.world_size} came with a roster of {len(roster)}")
    if view.exchange and view.exchange not in choices:
        raise RemoteProtocolError(f"VIEW with the exchange {view.exchange!r}, which is none to choose")
    if len(roster) % seat.stages:
        raise RemoteProtocolError(f"VIEW of {len(roster)} members of a model in {seat.stages} stages")
    return seat


def _cuts(view: m.View, entered: Enter | None) -> tuple[int, ...]:
    """Where this generation's stages begin; (): it is in one piece.  Raises `RemoteProtocolError`."""
    if entered is None or not entered.in_stages:
        return ()
    defined = cuts_of(entered.setup)
    cuts = view.cuts or defined
    ascending = cuts[0] == 0 and all(a < b for a, b in pairwise(cuts))
    if len(cuts) < 2 or not ascending or cuts[-1] != defined[-1]:
        raise RemoteProtocolError(f"VIEW of a model of {defined[-1]} blocks, cut at {list(cuts)[:8]}")
    return cuts


def enter(
    view: m.View, seat: Seat, lasting: Lasting, before: Generation | None, now_s: float
) -> tuple[Generation | None, list[Effect]]:
    """The generation, and what its VIEW leads to before anybody speaks in it; None: this worker stops.

    Args:
        before: the generation that it was in.
    """
    holding, setup, mine = lasting.holding, lasting.setup, seat.roster[seat.rank]
    old = before.seat if before is not None else None
    was_synced, at = holding.synced, holding.at
    known = old.roster if old is not None else ()
    effects: list[Effect] = [*spoken(lasting.allegiance.name, known, seat.roster, seat.rank)]
    lasting.allegiance.called(mine.name)
    if before is not None:
        effects += before.end(view)
    else:
        holding.execute(view, None)
    holding.seated(seat.blocks, may_recall=at == (view.applied, view.history))
    if _is_stale(view, mine, lasting, was_in_none=before is None):
        return None, [*effects, Stop(_stale_model())]
    missed_some = old is not None and old.generation + 1 < view.generation
    left_behind = missed_some and was_synced and not holding.synced
    lasting.allegiance.term, holding.ledger = view.term, view.ledger
    lasting.pace.interrupted()
    if not holding.synced:
        # The first generation starts from the state of the member that is not `joining`.
        begins = view.applied < 0 and not mine.joining
        holding.lacks(view, seat.blocks, begins and setup is not None and setup.held is None)
    follows = setup is not None and setup.follows and view.applied >= 0
    chained = not (lasting.in_stages or follows or holding.synced)
    generation = Generation(seat, view.applied + 1, lasting, now_s, chained=chained)
    effects += lasting.checkpoints.viewed(seat, lasting.in_stages, lasting.edges.up)
    effects += lasting.handover.viewed(seat, view.applied, view.history, holding.synced)
    fields = {
        "generation": view.generation, "rank": seat.rank, "of": seat.world_size, "reason": view.reason,
    }  # fmt: skip
    effects.append(Note("view", fields))
    if left_behind:
        effects.append(Note("left_behind", {"step": view.applied}))
    lasting.edges.viewed(seat)
    if holding.synced:
        lasting.following.donors = ()
    elif lasting.following.donors:
        effects.append(Arrive(view.applied, view.history))
    return generation, [*effects, *lasting.let_go(seat), *generation.dials()]


def _is_stale(view: m.View, mine: m.Member, lasting: Lasting, was_in_none: bool) -> bool:
    """Whether it is named for the model that its script made, or for the checkpoint with which it came, and
    the model has followed since.  A stage is built anew."""
    if mine.joining or lasting.in_stages or not lasting.holding.touched:
        return False
    return was_in_none if view.applied >= 0 else not lasting.holding.synced


def _stale_model() -> JoinRefused:
    return JoinRefused(
        "stale-model",
        "nobody holds the run's state any more, and this worker's model is of steps that are gone",
        remedy="restart this worker: it begins from its latest checkpoint, or as the script does",
    )
