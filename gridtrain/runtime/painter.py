"""What the trainer may know, made of what the core and the driver's parts say just now.

Decides what of it is offered to the trainer already.  Never wakes it (`runtime.meeting` does).
"""

from __future__ import annotations

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.member import MemberCore
from gridtrain.runtime.catching_up import CatchingUp
from gridtrain.runtime.disk_duties import DiskDuties
from gridtrain.runtime.donating import Donating
from gridtrain.runtime.giving import Giving
from gridtrain.runtime.picture import Picture
from gridtrain.runtime.residuals import Residuals
from gridtrain.runtime.taking import Taking


class Painter:
    """See the module's text.  Used from the loop's thread alone."""

    def __init__(
        self,
        giving: Giving,
        taking: Taking,
        donating: Donating,
        catching_up: CatchingUp,
        residuals: Residuals,
        disk: DiskDuties,
    ) -> None:
        self._giving, self._taking = giving, taking
        self._donating, self._catching_up = donating, catching_up
        self._residuals, self._disk = residuals, disk
        self._assigned: tuple[m.RoundId | None, tuple[m.Span, ...], int] = (None, (), 0)

    def paint(self, here: MemberCore) -> Picture:
        seat = here.seat
        me = seat.roster[seat.rank] if seat is not None else None
        spans, total = self._positions(here)
        reload = self._disk.reload_in(here.term, here.generation, synced=here.synced)
        given = self._taking.intake.complete_for(here.generation) and not here.synced
        inheritance = self._residuals.inheritance
        return Picture(
            welcomed=here.welcomed,
            stage=here.stage,
            generation=here.generation,
            rank=seat.rank if seat is not None else 0,
            world_size=seat.world_size if seat is not None else 0,
            open_round=here.next_round,
            spans=spans,
            total_samples=total,
            shares=seat.shares if seat is not None else (),
            applied=here.applied,
            history=here.history,
            ledger=here.ledger,
            finished=here.finished and here.stage is io.Stage.RUNNING,
            run_state=here.run_state,
            wanted_state=self._giving.wanted,
            offered_state=(given and self._catching_up.may_load) or reload is not None,
            wanted_image=self._donating.wanted,
            offered_work=self._catching_up.has_work,
            compares_next=here.compares_next,
            inherited=bool(inheritance.counting),
            synced=here.synced,
            touched=here.touched,
            heir=here.takes_over or inheritance.open,
            doomed=here.doomed,
            reload=reload,
            donor=here.donor,
            due_digest=me.digest if me is not None else b"",
            wanted_kept=self._giving.wanted_kept,
            discard_after=self._disk.discard_after,
            name=me.name if me is not None else "",
            exchange=seat.exchange if seat is not None else "",
            aside=self._disk.aside,
            cuts=seat.cuts if seat is not None else (),
            first_step=here.first_step,
        )

    def _positions(self, here: MemberCore) -> tuple[tuple[m.Span, ...], int]:
        """This worker's in the open step, and everybody's samples: worked out once for each round."""
        open_round = here.next_round
        if open_round is None:
            return (), 0
        if open_round != self._assigned[0]:
            self._assigned = (open_round, *here.positions())
        return self._assigned[1:]
