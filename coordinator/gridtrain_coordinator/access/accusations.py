"""Decides which accusations of breaking the protocol count, and when they remove a member.

    accuser         accused             consequence
    (coordinator)   anna                always counts
    bert            anna, three times   all three count, and anna is removed
    bert            anna, carl          bert is suspected if he is the only accuser of both
    then dora       anna                bert is no longer the only accuser of anna, and no longer suspected

Accusations by a suspected accuser are not counted, and further accusations by it are not recorded.  If no
other member accuses one of the same members within `CONFIRMATION_TIMEOUT_S`, the accuser is removed and all
its accusations are withdrawn.

A dishonest member can cause the removal of at most one other member, which is restored once the dishonest
member is identified.  A member whose incoming data is corrupted by its memory or by a middlebox is identified
in the same way.  If only two members are involved, it cannot be determined which is at fault; three
accusations are then enough to remove the accused.  There is no protection if dishonest members cooperate, or
if one accuses only one other member.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gridtrain.core.messages import PeerId

VIOLATIONS_BEFORE_REMOVAL = 3
CONFIRMATION_TIMEOUT_S = 5.0
"""How long other members have to confirm an accusation.

If two members attack all others at the same time, each of the others accuses both within this time.
"""

MAX_ACCUSED = 10_000


@dataclass(frozen=True, slots=True)
class ViolationRecord:
    """One violation.

    Attributes:
        accuser: the member that reported it; None if the coordinator itself detected it.
    """

    accuser: PeerId | None
    reason: str


def exceeds_limit(violations: int) -> bool:
    return violations >= VIOLATIONS_BEFORE_REMOVAL


def is_common_accuser(alone_with: Collection[PeerId]) -> bool:
    """Return whether an accuser is probably at fault: it is the only accuser of two or more members.

    Args:
        alone_with: the members that it alone accuses.
    """
    return len(alone_with) >= 2


class ViolationLog:
    """The accusations in a run.

    Keeps at most `MAX_ACCUSED` accused members (the oldest is dropped), and for each of them at most
    `VIOLATIONS_BEFORE_REMOVAL` violations reported by each accuser.
    """

    def __init__(self) -> None:
        self._records: dict[PeerId, list[ViolationRecord]] = {}
        self._suspects: dict[PeerId, float] = {}  # with the deadline for confirmations

    def add(self, accused: PeerId, record: ViolationRecord) -> bool:
        """Record a violation.

        Returns False and records nothing if a member accuses itself, if the accuser is suspected, or if it
        has already accused this member `VIOLATIONS_BEFORE_REMOVAL` times.
        """
        records = self._records.get(accused, [])
        count = sum(earlier.accuser == record.accuser for earlier in records)
        is_excluded = record.accuser == accused or record.accuser in self._suspects
        if is_excluded or count >= VIOLATIONS_BEFORE_REMOVAL:
            return False
        if not records and len(self._records) >= MAX_ACCUSED:
            del self._records[next(iter(self._records))]
        self._records[accused] = [*records, record]
        return True

    def review_suspects(self, now_s: float) -> list[PeerId]:
        """Update the set of suspected accusers; return those whose accusations were not confirmed in time."""
        alone: dict[PeerId, list[PeerId]] = {}
        for accused, records in self._records.items():
            accusers = {record.accuser for record in records}
            if len(accusers) == 1 and (accuser := accusers.pop()) is not None:
                alone.setdefault(accuser, []).append(accused)
        common = sorted(accuser for accuser, alone_with in alone.items() if is_common_accuser(alone_with))
        self._suspects = {
            accuser: self._suspects.get(accuser, now_s + CONFIRMATION_TIMEOUT_S) for accuser in common
        }
        return [accuser for accuser, until_s in self._suspects.items() if now_s >= until_s]

    def accused_by(self, accuser: PeerId) -> list[PeerId]:
        return [peer for peer, records in self._records.items() if any(x.accuser == accuser for x in records)]

    def is_suspected(self, accuser: PeerId | None) -> bool:
        return accuser in self._suspects

    def members_over_limit(self) -> list[PeerId]:
        """Return the members that unsuspected accusers have accused often enough to be removed."""
        return [accused for accused in self._records if exceeds_limit(self.count(accused))]

    def count(self, accused: PeerId) -> int:
        """Return how many violations count against this member: those not reported by a suspected accuser."""
        return sum(not self.is_suspected(record.accuser) for record in self._records.get(accused, ()))

    def records_of(self, accused: PeerId) -> Sequence[ViolationRecord]:
        return self._records.get(accused, ())

    def accused_members(self) -> list[PeerId]:
        return list(self._records)

    def withdraw_accusations(self, accuser: PeerId) -> None:
        """Delete all accusations made by `accuser`."""
        self._suspects.pop(accuser, None)
        for accused, records in list(self._records.items()):
            remaining = [record for record in records if record.accuser != accuser]
            if remaining:
                self._records[accused] = remaining
            else:
                del self._records[accused]

    def clear(self, accused: PeerId) -> None:
        self._records.pop(accused, None)
