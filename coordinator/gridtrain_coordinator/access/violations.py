"""Who broke the protocol towards whom: the strikes, and whom to believe.

Decides when a member has had enough strikes, and when an accuser is itself the fault.  Never removes
anybody (`protocol.door`), and never looks at what the accusation says.

    accuser   accused                             what follows
    (us)      anna                                always counts: the coordinator has seen it itself
    bert      anna, anna, anna                    all count: anna is out
    bert      anna, carl   and nobody else does   bert is the common end of both: suspected
    dora      anna                                bert is not alone with anna any more: believed again

While an accuser is suspected, what it said moves nobody, and what it says is not written down.  If nobody
else has confirmed one of its stories within `GRACE_S`, it is out, and all that it said is withdrawn.

What this promises: one liar, whatever it says, costs the group at most one other member, and that one is
let in again when the liar is found out.  A member whose broken memory or middle box ruins what it receives
is found too.  What it does not promise: which of two was at fault, when it is one word against one
(three accusations are then enough); a group in which the honest cannot confirm each other because the
liars work together, or because only one honest member is there to be attacked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gridtrain.core.messages import PeerId

VIOLATIONS_BEFORE_REMOVAL = 3
CONFIRMATION_TIMEOUT_S = 5.0
"""Two members that attack everybody at once are accused by everybody within this."""

MAX_ACCUSED = 10_000


@dataclass(frozen=True, slots=True)
class ViolationRecord:
    """accuser None: the coordinator saw it itself."""

    accuser: PeerId | None
    reason: str


def exceeds_limit(strikes: int) -> bool:
    return strikes >= VIOLATIONS_BEFORE_REMOVAL


def is_common_accuser(alone_with: Collection[PeerId]) -> bool:
    """An accuser that nobody confirms about two different members is what these stories share."""
    return len(alone_with) >= 2


class ViolationLog:
    """See the module's text.  Bounded: `MAX_ACCUSED` members (the longest known is forgotten), and
    `STRIKES` strikes from each accuser."""

    def __init__(self) -> None:
        self._records: dict[PeerId, list[ViolationRecord]] = {}
        self._suspects: dict[PeerId, float] = {}  # and until when they may be confirmed

    def add(self, accused: PeerId, strike: ViolationRecord) -> bool:
        """False: it is not written down, and changes nothing."""
        strikes = self._records.get(accused, [])
        same = sum(known.accuser == strike.accuser for known in strikes)
        if accused == strike.accuser or same >= VIOLATIONS_BEFORE_REMOVAL or strike.accuser in self._suspects:
            return False
        if not strikes and len(self._records) >= MAX_ACCUSED:
            del self._records[next(iter(self._records))]
        self._records[accused] = [*strikes, strike]
        return True

    def review_suspects(self, now_s: float) -> list[PeerId]:
        """Look at the suspects again; those whose time is up."""
        alone: dict[PeerId, list[PeerId]] = {}
        for accused, strikes in self._records.items():
            accusers = {strike.accuser for strike in strikes}
            if len(accusers) == 1 and (accuser := accusers.pop()) is not None:
                alone.setdefault(accuser, []).append(accused)
        common = sorted(accuser for accuser, alone_with in alone.items() if is_common_accuser(alone_with))
        self._suspects = {
            accuser: self._suspects.get(accuser, now_s + CONFIRMATION_TIMEOUT_S) for accuser in common
        }
        return [accuser for accuser, until_s in self._suspects.items() if now_s >= until_s]

    def accused_by(self, accuser: PeerId) -> list[PeerId]:
        return [
            accused
            for accused, strikes in self._records.items()
            if any(strike.accuser == accuser for strike in strikes)
        ]

    def is_suspected(self, accuser: PeerId | None) -> bool:
        return accuser in self._suspects

    def members_over_limit(self) -> list[PeerId]:
        """All who have had enough, by the word of those who are not suspected."""
        return [accused for accused in self._records if exceeds_limit(self.count(accused))]

    def count(self, accused: PeerId) -> int:
        """Strikes that count."""
        return sum(not self.is_suspected(strike.accuser) for strike in self._records.get(accused, ()))

    def records_of(self, accused: PeerId) -> Sequence[ViolationRecord]:
        return self._records.get(accused, ())

    def accused_members(self) -> list[PeerId]:
        return list(self._records)

    def withdraw_accusations(self, accuser: PeerId) -> None:
        """All that it said."""
        self._suspects.pop(accuser, None)
        for accused, strikes in list(self._records.items()):
            kept = [strike for strike in strikes if strike.accuser != accuser]
            if kept:
                self._records[accused] = kept
            else:
                del self._records[accused]

    def clear(self, accused: PeerId) -> None:
        self._records.pop(accused, None)
