"""Checkpoints of stages on a worker's disk: which count, who gets one, and what a stage is put together from.

Decides that for one member of a model in stages.  Never reads or writes a checkpoint: it keeps book of what
the loop says is on the disk (`Keeping`), and never decides who needs what, which the VIEW says.

    VIEW      PutAside      what is in memory alone, and a stage of the new cut is put together from
              Kept          to the coordinator: a piece that is to come from here is not here
              Reload        all that our stage is put together from is here
              PieceAsk -->  or comes, one piece after the other
              <-- PieceAsk  SendCopy, as soon as it is here
    a step    SendCopy      our latest to the next stage's disk: a dead disk alone must not lose a stage
    START     Discard       what is of later steps: the group went back beyond it
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.errors import RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.allegiance import Allegiance
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.holding import Holding
from gridtrain.protocol.member_io import Discard, Effect, Post, PutAside, Reload, SendCopy, TakeCopy


class Checkpoints:
    """See the module's text.

    Args:
        holding: what is in memory.
        allegiance: the coordinator is told what is here.

    Attributes:
        generation: in which that is said; 0: in none.
        kept: on the disk.
        reloading: of these, what the trainer is to load.
    """

    def __init__(self, holding: Holding, allegiance: Allegiance) -> None:
        self.kept: tuple[m.Held, ...] = ()
        self.reloading: tuple[m.Held, ...] = ()
        self._holding = holding
        self._allegiance = allegiance
        self.generation = 0
        self._aside: m.Held | None = None  # what of our memory is being written to the disk
        self._unwritten = False  # and cannot be: it stays in memory until the coordinator has planned anew
        self._asked: dict[m.PeerId, m.PieceAsk] = {}  # to be answered once it is on the disk

    def on_disk(self, blocks: m.Span) -> m.Held | None:
        """Our checkpoint of these blocks of the state with which this generation begins."""
        at = self._holding.at
        return next((held for held in self.kept if held.is_of(blocks, *at)), None)

    def tell(self) -> list[Effect]:
        """Not before it is known whether what is put aside is there: else it would be planned without."""
        if self._aside is not None and not self._unwritten:
            return []
        return self._allegiance.tell(m.Kept(self.kept, self.generation))

    def discard(self, applied: int) -> list[Effect]:
        """Nothing after the last committed step is of this history: the group went back beyond it."""
        kept = tuple(held for held in self.kept if held.applied <= applied)
        if len(kept) == len(self.kept):
            return []
        self.kept = kept
        return [Discard(applied), *self.tell()]

    # -- a generation begins ---------------------------------------------------------------------

    def viewed(self, seat: Seat, in_stages: bool, up: Collection[m.PeerId]) -> list[Effect]:
        """What others or we ourselves put stages together from; and our own."""
        self._asked.clear()
        self.reloading, self.generation = (), seat.generation
        return self._put_aside(seat) + self._lacking(seat) + (self.reload(seat, up) if in_stages else [])

    def spared(self) -> None:
        """No stage is ours any more."""
        self.reloading, self._aside = (), None

    def _put_aside(self, seat: Seat) -> list[Effect]:
        """What is in memory alone, and others or we ourselves put a stage of another cut together from."""
        blocks, self._aside, self._unwritten = self._holding.memory, None, False
        wanted = {piece for member in seat.roster for piece in member.pieces}
        if blocks is None or (blocks, seat.rank) not in wanted or self.on_disk(blocks) is not None:
            return []
        self._aside = m.Held(*self._holding.at, self._holding.ledger, blocks)
        return [PutAside(self._aside)]

    def _lacking(self, seat: Seat) -> list[Effect]:
        """A piece that is to come from here is not here: the coordinator has to plan without it."""
        wanted = {blocks for x in seat.roster for blocks, rank in x.pieces if rank == seat.rank}
        coming = self._aside.blocks if self._aside is not None else None
        if all(blocks == coming or self.on_disk(blocks) is not None for blocks in wanted):
            return []
        return self.tell()

    def reload(self, seat: Seat, up: Collection[m.PeerId]) -> list[Effect]:
        """Sent by nobody: it is on our disk, or comes there from those who have it, one after the other."""
        if self._holding.synced or self._aside is not None:
            return []
        wanted = seat.pieces or ((seat.blocks, seat.rank),)
        found = [held for blocks, _ in wanted if (held := self.on_disk(blocks)) is not None]
        if len(found) == len(wanted):
            self.reloading, self._holding.memory = tuple(found), None  # the trainer may have begun to load
            return [Reload(seat.term, seat.generation, self.reloading, seat.blocks)]
        for blocks, rank in seat.pieces:
            peer = seat.roster[rank].peer if rank < seat.world_size else seat.me
            if self.on_disk(blocks) is None and peer != seat.me:
                asks = Post(peer, m.PieceAsk(seat.term, seat.generation, blocks))
                return [asks] if peer in up else []
        return []

    # -- the disk holds something else -----------------------------------------------------------

    def keep(self, states: tuple[m.Held, ...], unwritten: m.Held | None) -> tuple[list[m.Held], bool]:
        """All that is on the disk now, and what cannot be put there.

        Returns what is new, and whether what was to be loaded is gone: then a donor may give it.
        """
        self._unwritten = self._unwritten or (unwritten is not None and unwritten == self._aside)
        before, self.kept = self.kept, states
        if self._aside is not None and self.on_disk(self._aside.blocks) is not None:
            self._aside = None
        lost = not set(self.reloading) <= set(states)
        if lost:
            self.reloading = ()
        return [held for held in states if held not in before], lost

    # -- others' disks, and ours for others ------------------------------------------------------

    def send_copy(self, seat: Seat, new: Sequence[m.Held], up: Collection[m.PeerId]) -> list[Effect]:
        """A dead disk alone must not lose a stage: our latest checkpoint goes to the next stage's too."""
        applied = self._holding.applied
        own = [held for held in new if held.blocks == seat.blocks and held.applied <= applied]
        if not own:
            return []
        keeper = seat.roster[seat.seats.keeper(seat.rank)].peer
        latest = max(own, key=lambda held: held.applied)
        return [SendCopy(keeper, seat.term, seat.generation, latest)] if keeper in up else []

    def give_piece(self, seat: Seat, peer: m.PeerId, asked: m.PieceAsk) -> list[Effect]:
        """A checkpoint that another member needs for its stage.  Raises `RemoteProtocolError`."""
        rank = seat.rank_of(peer)
        if rank is None or (asked.blocks, seat.rank) not in seat.roster[rank].pieces:
            raise RemoteProtocolError(
                f"rank {rank} asked for {_said(asked.blocks)}, which it is to get elsewhere"
            )
        held = self.on_disk(asked.blocks)
        if held is None:
            self._asked[peer] = asked
            return []
        return [SendCopy(peer, seat.term, seat.generation, held, awaited=True)]

    def give_late(self, seat: Seat) -> list[Effect]:
        """To whom it was not given, as it was not here yet."""
        asked, self._asked = self._asked, {}
        return [effect for peer, piece in asked.items() for effect in self.give_piece(seat, peer, piece)]

    def take_copy(self, seat: Seat, in_stages: bool, peer: m.PeerId, block: m.Copy) -> list[Effect]:
        """Raises `RemoteProtocolError` for a stage that is not ours to keep."""
        owner, rank, held = seat.seats.kept_for(seat.rank), seat.rank_of(peer), block.held
        is_piece = rank is not None and (held.blocks, rank) in seat.pieces
        if rank is not None and is_piece and (held.applied, held.history) == self._holding.at:
            known = seat.piece_digest(held.blocks, rank)
            if known and held.digest != known:
                raise RemoteProtocolError(
                    f"rank {rank} sent a checkpoint of {_said(held.blocks)} with the digest "
                    f"{held.digest.hex()[:12]}, known is {known.hex()[:12]}"
                )
            return [TakeCopy(peer, block)]
        blocks = seat.blocks_of(seat.seats.stage_of(owner))
        if not in_stages or rank != owner or held.blocks != blocks:
            raise RemoteProtocolError(
                f"rank {rank} sent a checkpoint of {_said(held.blocks)}; "
                f"rank {seat.rank} keeps those of rank {owner} alone"
            )
        if held.applied > self._holding.applied + 1:
            raise RemoteProtocolError(
                f"rank {owner} sent a checkpoint of step {held.applied + 1}; "
                f"{self._holding.applied + 1} is open here"
            )
        return [TakeCopy(peer, block)]


def _said(blocks: m.Span) -> str:
    return f"blocks {blocks.start} to {blocks.stop - 1}"
