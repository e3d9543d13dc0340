"""The state that this worker lacks: it comes in blocks, is taken by the trainer, and is passed on meanwhile.

Decides what is still asked for, and whether what came is what the donor has.  Never decides whom to ask (the
core does), and never loads a state: the trainer's thread does.

    StateRequest --> still_lacked --> donor
    StateBlock, StateDigest --> StateIntake --complete--> trainer: take
                                    |    \\-- refuted: begin anew, with the donor itself
                                    +--> PassingOutlet --> the next member that lacks it
"""

from __future__ import annotations

from dataclasses import replace

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime.meeting import Meeting
from gridtrain.runtime.passing_on import PassingOutlet
from gridtrain.runtime.statefeed import StateIntake


class Taking:
    """See the module's text.

    Attributes:
        intake: what has come; guarded by `Meeting.changed` where it is changed.
        passing: its way to others; the loop's alone.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.intake = StateIntake()
        self.passing = PassingOutlet(self.intake)

    # -- the trainer's thread --------------------------------------------------------------------

    def allow(self, max_bytes: int) -> None:
        """The largest state that a donor may send."""
        with self._meeting.changed:
            self.intake.allow(max_bytes)

    def take(self) -> tuple[int, int, list[bytes]] | None:
        """Term, generation and blobs of the donor's state, complete; `Restored` is to follow.

        None: the one that was offered is gone, as that of the next generation has begun to come.
        """
        with self._meeting.changed:
            return self.intake.blobs() if self.intake.complete else None

    def blame_donor(self, generation: int, reason: str) -> None:
        """What was given as this worker's state is not that."""
        picture = self._meeting.look()
        if picture.generation == generation and picture.donor is not None:
            self._meeting.command(io.Offence(picture.donor, reason))

    # -- the loop's thread -----------------------------------------------------------------------

    def still_lacked(self, ask: m.StateRequest) -> m.StateRequest | None:
        """For what is not here yet; None: that is nothing."""
        have = self.intake.have(ask.generation) if ask.whole and not ask.digest else 0
        if not have or self.intake.left_bytes(ask.generation):
            return replace(ask, have=have)
        if self.intake.lacks_word(ask.generation):
            return replace(ask, digest=True)
        return None

    def block(self, block: m.StateBlock, *, vouched: bool, passes_on: bool) -> None:
        """`vouched`: it is the donor's.  Raises `RemoteProtocolError` for one that cannot belong here."""
        with self._meeting.changed:
            self._meeting.progress += 1
            self.intake.keeps = passes_on
            self.intake.take(block, vouched=vouched)

    def expect(self, generation: int, digest: bytes) -> None:
        """The donor says what its state's digest is."""
        with self._meeting.changed:
            self.intake.expect(generation, digest)

    def refuted(self, generation: int) -> bool:
        """All of a state has come, and the donor's has another digest: it is forgotten."""
        with self._meeting.changed:
            if not self.intake.is_refuted(generation):
                return False
            self.intake.forget()
            self.passing.stop()
            return True
