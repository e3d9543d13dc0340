"""How the model is cut for those who are here, and who of them sits where; or why nobody can go on.

Decides that for the next generation of a run in stages, from what they hold, their memory and their links.
Never decides which step it goes on from (`protocol.copies`), never makes the generation.

    as many workers as stages ----> seats in the defined cut; where a memory is too small: another one
    fewer ------------------------> wait `recut_s` for a quick rejoiner, then a new cut over all here
    a disk takes nothing any more -> the cut of before, in which nobody needs it
    newcomers --------------------> another replica or, where there are too few stages, a further one?

See `protocol.recutting` and `protocol.assigning` for where a model is cut, `protocol.seating` for seats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gridtrain.errors import ConfigError
from gridtrain.protocol import assigning, recutting
from gridtrain.protocol import messages as m
from gridtrain.protocol.copies import Begin, held_by, too_few
from gridtrain.protocol.making import Making
from gridtrain.protocol.on_disks import OnDisks
from gridtrain.protocol.plans import Plans
from gridtrain.protocol.recutter import Recutter
from gridtrain.protocol.recutting import Recut, cuts_of
from gridtrain.protocol.roll import Worker, workers
from gridtrain.protocol.run import Run
from gridtrain.protocol.seating import Hands, Seating, seat
from gridtrain.protocol.stage_costs import Card
from gridtrain.protocol.unwritten import cut_of

Live = Mapping[m.PeerId, m.Span]
"""Of which blocks the states in memory are."""

Placed = tuple[Seating, tuple[int, ...]]
"""Who sits where, and how the model is cut."""


class Placing:
    """See the module's text."""

    def __init__(self, run: Run, making: Making, plans: Plans, disks: OnDisks) -> None:
        self._run, self._making, self._plans, self._disks = run, making, plans, disks
        self._recutter = Recutter()
        self._cuts_before: tuple[int, ...] = ()  # of the generation before, where the model was cut otherwise
        self._short_since_s: float | None = None  # fewer workers than stages are here
        # Workers for whose seats there was no room, and the cut in which that was so.
        self._without: tuple[frozenset[m.PeerId], tuple[int, ...]] | None = None

    @property
    def _setup(self) -> m.Setup:
        assert self._run.reference is not None
        return self._run.reference

    @property
    def _is_short(self) -> bool:
        """Of stages: the model is cut into fewer than the run is defined with."""
        return self._run.reference is not None and self._run.stages < self._run.reference.stages

    # -- while the run trains ----------------------------------------------------------------------

    def makes_a_replica(self, newcomers: Sequence[Worker]) -> bool:
        """Or a further stage, where there are fewer than the run is defined with."""
        run = self._run
        if self._without == (frozenset(run.taking_part()), run.cut):
            return False  # these have no room for the seats that are left
        here = len(run.present) + len(newcomers)
        if newcomers and self._is_short and here > run.stages:
            return self._recutter.pays(self._setup, run.cut, here)
        return here // run.stages > len(run.order) // run.stages

    # -- for the next generation -------------------------------------------------------------------

    def place(self, begin: Begin, live: Live, now_s: float) -> Placed | str:
        """Who sits where in the next generation, and how its model is cut; else why nobody can go on."""
        setup, stages, self._making.until_s = self._setup, self._run.stages, math.inf
        peers = self._run.taking_part()
        enough = len(peers) >= setup.stages
        if enough or not peers:
            self._short_since_s = None
        reason = "" if enough else too_few(stages, len(peers), begin.latest)
        if begin.outcome is None:
            return reason if len(peers) < stages else begin.reason
        if begin.outcome.applied < 0 and not enough:
            return reason  # nothing is lost by waiting for all
        try:
            if enough:
                return self._for_all_stages(begin, live, now_s)
            recut = self._fewer_stages(begin)
            if len(recut.cuts) - 1 >= stages:
                self._short_since_s = None
            elif self._waits(now_s):
                wait = f"{self._run.limits.recut_s:g} s"
                return f"{reason}, or {wait} later over {workers(len(recut.cuts) - 1)}, cut anew"
            return self._seated(recut, begin, live, now_s)
        except ConfigError as error:
            why = recutting.said(error)
            if not reason:
                return f"{workers(len(peers))} are here, but their memory is too small: {why}"
            return f"{reason}; cut anew it does not fit: {why}" if why else reason

    def as_before(self, begin: Begin, live: Live, now_s: float) -> Placed | None:
        """In the cut in which those are whose disks are full; None: that cannot be."""
        here = [span for peer, span in live.items() if self._run.workers[peer].unwritten]
        cuts, peers = cut_of(here, self._run.cut, self._cuts_before), self._run.taking_part()
        if not cuts or len(peers) < len(cuts) - 1:
            return None
        try:
            hands = self._hands(begin, cuts, live)
            found = self._seat(recutting.at_cuts(cuts, peers, hands), hands, now_s), cuts
        except ConfigError:
            return None
        self._without = frozenset(peers), cuts
        return found

    def settle(self, cuts: tuple[int, ...]) -> None:
        """The next generation is cut so."""
        run = self._run
        if run.roster and cuts != run.cut:
            self._cuts_before = run.cut
        run.cuts, self._short_since_s = cuts, None

    def _waits(self, now_s: float) -> bool:
        """For a quick rejoiner, who saves the new cut."""
        since_s = self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
        if now_s >= since_s + self._run.limits.recut_s:
            return False
        self._making.until_s = since_s + self._run.limits.recut_s
        return True

    # -- cuts --------------------------------------------------------------------------------------

    def _for_all_stages(self, begin: Begin, live: Live, now_s: float) -> Placed:
        """There are workers for all stages; where one's memory is too small it is cut as it fits."""
        assert begin.outcome is not None
        try:
            return self._seated(self._defined_cut(begin, live, now_s), begin, live, now_s)
        except ConfigError:
            if begin.outcome.applied < 0:
                raise
        as_they_were = self._as_they_were(begin, live)
        if as_they_were is not None:
            self._without = frozenset(self._run.taking_part()), as_they_were.cuts
        return self._seated(as_they_were or self._fewer_stages(begin), begin, live, now_s)

    def _defined_cut(self, begin: Begin, live: Live, now_s: float) -> Recut:
        """There are workers for all stages."""
        assert begin.outcome is not None
        setup, peers = self._setup, self._run.taking_part()
        cuts = cuts_of(setup) if self._is_short else self._run.cut
        cards = self._cards(peers)
        free = setup.model is not None and not setup.model.fixed
        if begin.outcome.applied < 0 and free and not assigning.is_even(setup, cuts, cards):
            return self._recutter.assign(setup, peers, cards, self._plans.cost_s(peers, now_s))
        peers = assigning.without_misfits(setup, cuts, peers, cards)
        if len(peers) < setup.stages:
            raise ConfigError(f"{workers(len(peers))} have memory for a stage", remedy="wait")
        return recutting.at_cuts(cuts, peers, self._hands(begin, cuts, live))

    def _as_they_were(self, begin: Begin, live: Live) -> Recut | None:
        """Those who hold a stage in memory, so have room for it: where newcomers' memory is too small for a
        seat, nobody stops for them.  None: a stage is in nobody's memory."""
        run = self._run
        stage_of = self._hands(begin, run.cut, live).live
        holders = [[p for p in run.taking_part() if stage_of.get(p) == n] for n in range(run.stages)]
        replicas = min(map(len, holders))
        chosen = {peer for stage in holders for peer in stage[:replicas]}
        members = tuple(peer for peer in run.taking_part() if peer in chosen)
        return Recut(run.cut, members, reason="the others' memory is too small") if replicas else None

    def _fewer_stages(self, begin: Begin) -> Recut:
        peers = self._run.taking_part()
        return self._recutter.fewer(self._setup, peers, self._cards(peers), begin.hands.holds)

    # -- seats -------------------------------------------------------------------------------------

    def _seated(self, recut: Recut, begin: Begin, live: Live, now_s: float) -> Placed:
        return self._seat(recut, self._hands(begin, recut.cuts, live), now_s), recut.cuts

    def _seat(self, recut: Recut, hands: Hands, now_s: float) -> Seating:
        """`hands`: of the new cut.  Raises `ConfigError` where a memory is too small for its seat."""
        run, peers = self._run, recut.members
        hands = recutting.within(hands, peers)
        if recut.cuts == run.cut:
            hands = replace(hands, stood={peer: run.stage_of(peer) for peer in run.order})
        cards = self._cards(peers)
        seated = seat(
            len(recut.cuts) - 1,
            peers,
            recutting.pinned(hands, recut),
            speed=lambda peer: cards[peer].speed,
            cost_s=self._plans.cost_s(peers, now_s),
            name=run.named,
        )
        assigning.refuse_overfull(self._setup, recut.cuts, seated.order, cards, run.named)
        spares = tuple(peer for peer in run.taking_part() if peer not in peers)
        reason = f"{seated.reason}; {recut.reason}" if recut.reason else seated.reason
        pieces = recutting.pieces(recut, seated.order, hands)
        return replace(seated, spares=(*seated.spares, *spares), pieces=pieces, reason=reason)

    def _cards(self, peers: Sequence[m.PeerId]) -> dict[m.PeerId, Card]:
        """Memory as they declared it, speed as they measured it, compared with each other."""
        setups = {peer: self._run.workers[peer].setup for peer in peers}
        speeds = assigning.speeds({p: s.flops if s is not None else 0.0 for p, s in setups.items()})
        return {
            peer: Card(speeds[peer], (setup.memory_bytes if setup is not None else 0) or math.inf)
            for peer, setup in setups.items()
        }

    def _hands(self, begin: Begin, cuts: Sequence[int], live: Live) -> Hands:
        """What they have of the stages of this cut."""
        assert begin.outcome is not None
        return held_by(begin.outcome, live, self._disks.trusted(), cuts)
