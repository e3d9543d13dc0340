"""Which exchange a run uses whose script leaves that open (`exchange="auto"`), and why.

Decides, from measured links, measured computing and the model's size, once for all members: what is chosen
travels in the View and is journalled with it.  Never measures, never makes a generation (`generations`).

    first generation: "" -----> all have computed a batch, links are known -----> a View with the choice
                                        |                                                |
                members compute, and wait before the exchange               they go on with the same gradient

    later: links, speeds or members change --> another choice, where it makes steps `WORTH` times as fast

The first batch of a worker takes longest (kernels are compiled), so the first choice may be dense where
later ones are not: a dense step then costs little beside the computing.  A choice may change at any
generation without loss: dense keeps nothing back, sparse exchanges keep it in the same residual, and a dense
step takes along what lies in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from gridtrain.config import Auto, Deadlines
from gridtrain.errors import ConfigError
from gridtrain.protocol.choosing import LITTLE, LOSSLESS, Outlook, fastest_of, recommend, said, said_s
from gridtrain.protocol.costs import Cost, cost
from gridtrain.protocol.lines import Network, even
from gridtrain.protocol.loads import Cpu, Load
from gridtrain.protocol.local_steps import propose_local_steps
from gridtrain.protocol.messages import PeerId, Setup
from gridtrain.protocol.ordering import WALKED_MOVES, best_order
from gridtrain.protocol.roads import DIRECT, MOST_MEMBERS, OPEN, RING, Road, road_of
from gridtrain.protocol.sharing import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.protocol.topology import WORTH, USUAL_Bps, load_of, named

FIRST_FIGURE = "first_computed_s"
"""A figure of a Beat: seconds of the batch whose gradient waits for the first choice."""

MOST_TIMES_MEDIAN = 4.0
"""The slowest member's computing counts as so many times the median at most: it is that worker's own word."""

MOST_ORDERED = 32
"""Members for which the best order of each exchange is looked for; above they are compared as they joined, as
three searches would hold up the coordinator."""

USUAL_ALPHA_s = 1e-3
BACK = 1.05
"""Dense, which leaves nothing out, is gone back to where its steps are at most so many times as long."""

SLOW = 0.5
"""Where less than this part of a step is computing, local steps are mentioned."""

_EXCHANGE = re.compile(r"(Dense|TopK|GTopK)\(([^()]*)\)")


def auto_of(setup: Setup | None) -> Auto | None:
    """What a run leaves to the coordinator; None: its script names an exchange."""
    return Auto.parse(dict(setup.facts).get("exchange", "")) if setup is not None else None


def pace_of(figures: Mapping[str, float]) -> float:
    """Seconds for a sample over a worker's whole stay, first batches left out; 0.0: not known."""
    samples, seconds = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
    return seconds / samples if 0 < samples < math.inf and 0 < seconds < math.inf else 0.0


def parameters_of(setup: Setup) -> int:
    """Of the model, by the facts; 0: they do not say."""
    found = re.match(r"(\d{1,18}) parameters", dict(setup.facts).get("model", ""))
    return int(found[1]) if found else 0


@dataclass(slots=True)
class Exchanging:
    """The choice of one run.

    Attributes:
        chosen: out of several exchanges.
        road: of a dense exchange that is open to it, in the generation that is made.
        reason: of the choice, in words; with what another one would gain now, if that is known.
        rates_s: so long the first choice waits for a measured rate.
        patience_s: so long for members that have not told what their first batch took, since the first has
            told: one that hangs must not hold up the others where no round with its deadlines is open.
    """

    chosen: str = ""
    reason: str = ""
    road: Road = RING
    rates_s: float = 2.0
    patience_s: float = Deadlines().first_step_s
    _setup: Setup | None = None
    _auto: Auto | None = None
    _news: str = ""  # what another choice would bring that is not worth it
    _told_s: float | None = None  # since when one has computed
    _asked_s: float | None = None  # since when all have
    _alone: bool = False  # chosen by a worker that had nobody to exchange with

    def defined(self, setup: Setup | None, chosen: str = "", alone: bool = False) -> None:
        """The run is known; `chosen`: what a journal says, and whether a worker alone had chosen it."""
        self.road = Road(True, "direct, as in the journal") if chosen == DIRECT else RING
        chosen = OPEN if self.road.direct else chosen
        self._setup, self._auto = setup, auto_of(setup)
        self.chosen = chosen if self._auto is not None and chosen in self._texts() else ""
        self.reason = f"{self.chosen}, as in the journal" if self.chosen else ""
        self._alone = alone and bool(self.chosen)

    @property
    def open(self) -> bool:
        """The coordinator has to choose, and has not yet."""
        return self._auto is not None and not self.chosen

    @property
    def is_auto(self) -> bool:
        return self._auto is not None

    @property
    def text(self) -> str:
        """For people; empty: the run's script names an exchange."""
        if self._auto is None:
            return ""
        said = self._in_words(self.reason)
        return f"{said}{'; ' + self._news if self._news else ''}" if self.chosen else "not chosen yet"

    @property
    def setup(self) -> Setup | None:
        """As if the script had named what was chosen: for orders of ranks, and for status."""
        if self._setup is None or not (self.chosen or self.road.direct):
            return self._setup
        named = ((n, self.chosen or t if n == "exchange" else t) for n, t in self._setup.facts)
        facts = tuple((n, self._in_words(t) if n == "exchange" else t) for n, t in named)
        return replace(self._setup, facts=facts)

    @property
    def named(self) -> str:
        """As `View.exchange`."""
        return DIRECT if self.road.direct else self.chosen

    def take_road(self, size: int, network: Network | None, edges: Callable[[], bool]) -> None:
        """A generation of so many is made.

        Args:
            network: as in `roads.road_of`.
            edges: likewise; asked where that matters.
        """
        self.road = RING
        setup = self.setup
        if setup is not None and setup.stages == 1 and OPEN in dict(setup.facts).get("exchange", ""):
            self.road = road_of(load_of(setup), size, network, size <= MOST_MEMBERS and edges())

    def off_road(self, size: int, network: Network) -> str:
        """Why the members, who stand and exchange directly, want a ring now; empty: they do not."""
        load = self.load
        found = road_of(load, size, network, True) if self.road.direct else RING
        if not self.road.direct or found.direct or found.gain < WORTH:
            return ""
        return f"links have changed: {found.reason}"

    def _in_words(self, text: str) -> str:
        return text.replace(OPEN, DIRECT, 1) if self.road.direct else text

    @property
    def load(self) -> Load | None:
        """What a round exchanges; None: not known."""
        return load_of(self.setup)

    @property
    def sparse(self) -> bool:
        """Updates are small: newcomers may follow them."""
        load = self.load
        return load is not None and load.kind.sparse

    def _texts(self) -> tuple[str, ...]:
        assert self._auto is not None and self._setup is not None
        return tuple(each.describe() for each in self._auto.exchanges(max(1, parameters_of(self._setup))))

    # -- choices -----------------------------------------------------------------------------------

    def first(
        self, peers: Sequence[PeerId], told: Mapping[PeerId, float], network: Network | None, now_s: float
    ) -> str:
        """Choose if that can be done now; the reason, empty: nothing new is chosen.

        Args:
            told: by member, `FIRST_FIGURE`.
            network: of `peers`, in any order; None: nothing is measured yet.
        """
        if not self.open or not peers:
            return ""
        if len(peers) > 1:
            if not any(peer in told for peer in peers):
                return ""
            self._told_s = now_s if self._told_s is None else self._told_s
            if any(peer not in told for peer in peers) and now_s < self._told_s + self.patience_s:
                return ""
            self._asked_s = now_s if self._asked_s is None else self._asked_s
            if network is None and now_s < self._asked_s + self.rates_s:
                return ""
        computing_s = _computing_s([told[peer] for peer in peers if peer in told])
        return self._choose(len(peers), network, computing_s)

    def again(self, size: int, network: Network | None, computing_s: Sequence[float]) -> str:
        """Choose anew where it is worth it; the reason, empty: the choice stays.

        What a worker alone had chosen is no choice for two: without measurements it is open again.

        Args:
            computing_s: of a step, by member; empty: not known.
        """
        if not self.chosen or size < 2 or self._auto is None:
            return ""
        if self._alone and (network is None or not computing_s):
            self.chosen, self.reason, self._alone = "", "", False
            return "a worker that was alone is no longer"
        if network is None or not computing_s:
            return ""
        if self._alone:
            return self._choose(size, network, _computing_s(computing_s))
        looks = self._looks(size, network, _computing_s(computing_s))
        at = next((index for index, text in enumerate(self._texts()) if text == self.chosen), None)
        if at is None or not looks:
            return ""
        here, best = looks[at], fastest_of(looks)
        dense = min((x for x in looks if x.load.kind in LOSSLESS), key=lambda x: x.step_s)
        self._news = ""
        if here.load.kind not in LOSSLESS and dense.step_s <= BACK * here.step_s:
            return self._take(looks, dense)
        if best is here:
            return ""
        gain = here.step_s / best.step_s
        if gain >= WORTH:
            return self._take(looks, best)
        if gain > 1 + LITTLE / 2:
            self._news = (
                f"{said(best)} would now make steps {gain - 1:.0%} faster, and is taken from "
                f"{WORTH - 1:.0%} on"
            )
        return ""

    def _choose(self, size: int, network: Network | None, computing_s: float) -> str:
        self._alone, self._told_s, self._asked_s = size == 1, None, None
        if size == 1:
            self.chosen = self._texts()[0]
            self.reason = f"{self.chosen}: one worker has nobody to exchange with"
            return self.reason
        looks = self._looks(size, network, computing_s)
        if not looks:
            self.chosen = self._texts()[0]
            self.reason = f"{self.chosen}: the model's size is not known"
            return self.reason
        best, _ = recommend(looks)
        return self._take(looks, best, measured=network is not None)

    def _take(self, looks: Sequence[Outlook], best: Outlook, *, measured: bool = True) -> str:
        self.chosen = self._texts()[looks.index(best)]
        self._news = ""
        self.reason = _why(self.chosen, looks, best)
        if not measured:
            self.reason += f"; no link is measured, each counts as {USUAL_Bps * 8 / 1e6:.0f} Mbit/s"
        assert self._auto is not None
        self.reason += _of_local_steps(best, self._auto)
        return self.reason

    def _looks(self, size: int, network: Network | None, computing_s: float) -> list[Outlook]:
        """Each choice on this network, in its best order where that can be looked for in a moment."""
        assert self._setup is not None
        count = parameters_of(self._setup)
        lines = network if network is not None else even(size, USUAL_ALPHA_s, USUAL_Bps)
        looks = []
        for text in self._texts() if count else ():
            found = _EXCHANGE.match(text)
            load = named(found[1], found[2], count) if found else None
            if load is None:
                raise ConfigError(f"{text!r} is no exchange", remedy="use gridtrain's own version")
            looks.append(Outlook(load, size, _cost(load, lines, measured=network is not None), computing_s))
        return looks


def _cost(load: Load, lines: Network, *, measured: bool) -> Cost:
    order: Sequence[int] = range(lines.size)
    if measured and 2 < lines.size <= MOST_ORDERED:
        order = best_order(load, lines, Cpu(), range(lines.size)).order
    return cost(load, lines.ordered(order), Cpu(), most_moves=WALKED_MOVES)


def _computing_s(seconds: Sequence[float]) -> float:
    """The slowest is waited for, whatever it says up to a bound."""
    usual = median(seconds) if seconds else 0.0
    return min(max(max(seconds, default=0.0), 1e-6), MOST_TIMES_MEDIAN * max(usual, 1e-6), 1e6)


def _why(chosen: str, looks: Sequence[Outlook], best: Outlook) -> str:
    text = (
        f"{chosen}: a step takes {said_s(best.step_s)} with {best.world_size} workers, "
        f"{said_s(best.compute_s)} of it computing"
    )
    others = sorted((look for look in looks if look is not best), key=lambda look: look.step_s)
    if not others:
        return text
    text += "; " + ", ".join(f"{said(other)} {said_s(other.step_s)}" for other in others)
    if best.load.kind in LOSSLESS and others[0].step_s < best.step_s:
        text += ": too little gained by leaving gradients out"
    return text


def _of_local_steps(best: Outlook, auto: Auto) -> str:
    """Only in words: they change what is optimized, which is the script's business."""
    if best.efficiency >= SLOW:
        return ""
    proposed = propose_local_steps(best.compute_s, best.cost.exchange_s)
    what = "" if auto.sparse else ", and a sparse exchange inside learns behind this optimizer, too"
    then = best.compute_s / (best.compute_s + best.cost.exchange_s / proposed.every)
    return (
        f"; only {best.efficiency:.0%} of a step is computing: LocalSteps(every={proposed.every}) in the "
        f"script would make it {then:.0%}{what}"
    )
