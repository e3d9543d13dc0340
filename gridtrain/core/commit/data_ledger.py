"""Assigns each sample of a pass to one worker and one step, and re-queues batches that are lost or too late.

Positions number the samples in the order in which the run assigns them: position p belongs to pass number
p // size over the data.  The sampler maps positions to samples by a permutation of each pass, which
`LedgerSpec.seed` determines.

    size = 10, shares 2 + 2             |<------ pass 0 ------>|<- pass 1
    positions                           0 1 2 3 4 5 6 7 8 9   10 11 12 ..
    consumed by steps 0 and 1           # # # # # # # #
    step 2, the end of the pass: a short step           a b
    step 3 begins the next pass                               a a b b

Every position below the cursor has been assigned.  `commit` and `reassign` check that each is counted once:

    cursor == consumed     in committed steps
            + requeued     taken back from members that were lost or too late; assigned first
            + holders      kept by each member after an aborted step (`reassign`)
            + late         the batches of absent members (see below)
            + pending      batches whose gradients the next step exchanges (see below)
            + leased       the rest of the shards that members read (`shard_leases`)

The state is replicated.  It changes only when a step commits (`commit`), or when a MembershipView follows an
aborted step (`reassign`).  All other values are computed from the state, identically on every worker.

A member can be absent from a step that commits, because its trainer has stalled.  Its batch is then late: it
remains the member's only assignment until the member takes part in a committed step again, which consumes the
batch.  Meanwhile, the member's share counts as 0.  A batch that is late by more than `MAX_LATE_STEPS` is
re-queued for other members.

If `LedgerSpec.delay` is 1, each batch is pending for one step: while a member computes the batch that a step
assigns to it, the gradient of its previous batch is exchanged; the next step consumes the new batch.

    step                    0        1        2        3, the last one with `steps=3`
    assigned                a0 b0    a1 b1    a2 b2    -
    exchanged, consumed     -        a0 b0    a1 b1    a2 b2

A share is a batch size in samples.  A step takes as many samples as the sum of all shares, or fewer at the
end of a pass, because it extends at most from the cursor to the end of the pass.  Therefore, no step has
samples from two passes unless some samples are re-queued.  A short step is split in proportion to the shares
(largest remainder, ties to the lower rank).  Filling the ranks one after another would leave the last
ranks idle while the first have full batches, and a step takes as long as its slowest worker.

If `LedgerSpec.shards` is not empty, each member gets as many samples in a step as without shards, but at
different positions: those of the shard that it has leased (`shard_leases`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gridtrain.core.commit.shard_leases import HandOut
from gridtrain.core.commit.spans import coalesce, subtract, take_first
from gridtrain.core.messages import DeferredBatch, LedgerSpec, LedgerState, PeerId, Span
from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.quantities import format_count

MAX_POSITION = 2**63 - 1  # positions and counts are sent as signed 64-bit integers

MAX_LATE_STEPS = 16
"""Maximum number of steps by which a batch may be late before it is re-queued (staleness bound)."""

Assignment = Mapping[PeerId, tuple[Span, ...]]


def validate(spec: LedgerSpec) -> None:
    """Raise `ConfigError` if the data set is empty, if epochs and steps are both None or both given, or if a
    number is out of bounds."""
    if spec.size < 1:
        raise ConfigError(
            f"the data set has {spec.size} samples; it must have at least 1",
            remedy="check the path or the filter that built the data set",
        )
    if not 0 <= spec.seed <= MAX_POSITION:
        raise ConfigError(f"the data seed is {spec.seed}; it must be >= 0 and < 2**63", remedy="use seed=0")
    if (spec.epochs is None) == (spec.steps is None):
        raise ConfigError(
            f"epochs is {spec.epochs} and steps is {spec.steps}; exactly one of them must be given",
            remedy="pass either epochs= or steps= to grid.batches",
        )
    if spec.epochs is not None and not 1 <= spec.epochs * spec.size <= MAX_POSITION:
        raise ConfigError(
            f"epochs is {spec.epochs} and the data set has {format_count(spec.size, 'sample')}; epochs must "
            "be at least 1, and epochs times the number of samples must be < 2**63",
            remedy="use epochs=1",
        )
    if spec.steps is not None and not 1 <= spec.steps <= MAX_POSITION:
        raise ConfigError(f"steps is {spec.steps}; it must be >= 1 and < 2**63", remedy="use steps=1000")


def is_finished(spec: LedgerSpec, state: LedgerState) -> bool:
    """Return whether the run is over: all its passes are consumed, or all its steps are committed."""
    if spec.epochs is not None:
        return state.consumed >= spec.epochs * spec.size
    return spec.steps is not None and state.step >= spec.steps + spec.delay


def can_be_last(spec: LedgerSpec, state: LedgerState, assignment: Assignment) -> bool:
    """Return whether the run is over once step `state.step` commits, if no member is absent from it."""
    if spec.epochs is None:
        return is_finished(spec, replace(state, step=state.step + 1))
    batches = [batch.spans for batch in state.pending] if spec.delay else assignment.values()
    consumed = sum(count_samples(spans) for spans in batches)
    return is_finished(spec, replace(state, consumed=state.consumed + consumed))


def count_samples(spans: Iterable[Span]) -> int:
    """Return the number of positions in `spans`."""
    return sum(span.stop - span.start for span in spans)


def predict_consumed(spec: LedgerSpec, consumed: int, steps: int, share: int) -> int:
    """Predict how many samples will have been consumed after `steps` more steps, if no member is absent.

    Args:
        consumed: the number of samples consumed so far.
        share: the sum of all shares, at least 1.
    """
    rest_of_pass = spec.size - consumed % spec.size
    in_next_passes = steps - -(-rest_of_pass // share)
    if in_next_passes < 0:
        return consumed + steps * share
    passes, begun = divmod(in_next_passes, -(-spec.size // share))
    return consumed + rest_of_pass + passes * spec.size + begun * share


def assign(
    spec: LedgerSpec, state: LedgerState, shares: Sequence[tuple[PeerId, int]]
) -> dict[PeerId, tuple[Span, ...]]:
    """Assign the positions of step `state.step`.

    Args:
        shares: the generation's members in rank order, each with its share in samples.

    Returns:
        The spans of each member, in rank order.  Each span lies within one pass.  A member without spans
        takes part with a zero contribution; in a finished run, no member has spans.  With a delay, the
        members contribute their pending batches instead of these spans.

    Raises:
        LocalProtocolError: the shares are invalid (a share is negative, none is above 0, or a member occurs
            twice), or a worker that already has positions is not a member.
    """
    peers = [peer for peer, _ in shares]
    wanted = sum(share for _, share in shares)
    if len(set(peers)) != len(peers) or wanted < 1 or any(share < 0 for _, share in shares):
        raise LocalProtocolError(
            f"shares of step {state.step} are {[(peer.hex()[:8], share) for peer, share in shares]}; "
            "no member may occur twice, no share may be negative, and their sum must be at least 1"
        )
    late = {batch.peer: batch.spans for batch in state.late}
    held = dict(state.holders or ()) | late
    owners = {batch.peer for batch in state.pending} | {peer for peer, _ in state.leases}
    if strangers := (held.keys() | owners) - set(peers):
        names = sorted(peer.hex()[:8] for peer in strangers)
        raise LocalProtocolError(f"positions of step {state.step} are assigned to non-members: {names}")
    if state.holders is not None:
        return {peer: held.get(peer, ()) for peer in peers}
    # With a delay, the last step assigns no batches, because no later step would consume them.
    is_last = spec.delay and spec.steps is not None and state.step >= spec.steps
    if is_last or is_finished(spec, state):
        return {peer: () for peer in peers}

    queue = deque((*state.requeued, *_rest_of_pass(spec, state)))
    leased = count_samples(span for _, span in state.leases)
    present = [0 if peer in late else share for peer, share in shares]
    counts = _split(min(count_samples(queue) + leased, sum(present)), present)
    if spec.shards:
        taken = _hand_out(spec, state, list(zip(peers, counts, strict=True))).taken
        return {peer: late.get(peer, tuple(taken[peer])) for peer in peers}
    return {
        peer: late[peer] if peer in late else take_first(queue, count)
        for peer, count in zip(peers, counts, strict=True)
    }


def predict_assignments(
    spec: LedgerSpec, state: LedgerState, shares: Sequence[tuple[PeerId, int]], peer: PeerId, count: int
) -> list[tuple[Span, ...]]:
    """Return the spans of `peer` in each of the `count` steps after `state.step`.

    The prediction holds if all steps commit, no member is absent, and none joins or leaves.  The list is
    shorter if the run ends earlier.
    """
    ahead: list[tuple[Span, ...]] = []
    for _ in range(count):
        state = commit(spec, state, assign(spec, state, shares), skipped=False)
        if is_finished(spec, state):
            break
        ahead.append(assign(spec, state, shares)[peer])
    return ahead


def contribution_weight(
    spec: LedgerSpec, state: LedgerState, assignment: Assignment, peer: PeerId
) -> tuple[int, int]:
    """Return the numbers of samples in a member's and in all members' contributions to step `state.step`.

    The contribution's weight is the quotient of the two numbers.  If the contribution is a late or pending
    batch, both numbers refer to the earlier step that assigned this batch.  The result is (0, 0) if the run
    has a delay and the member has no pending batch.

    Args:
        assignment: the result of `assign` for this step.
    """
    deferred = {batch.peer: batch for batch in (state.pending if spec.delay else state.late)}
    if peer in deferred:
        return count_samples(deferred[peer].spans), deferred[peer].total_samples
    if spec.delay:
        return 0, 0
    return count_samples(assignment[peer]), count_samples(_newly_assigned(state, assignment))


def commit(
    spec: LedgerSpec,
    state: LedgerState,
    assignment: Assignment,
    *,
    skipped: bool,
    absent: Collection[PeerId] = (),
) -> LedgerState:
    """Return the state after the commit of step `state.step`.

    The step consumes the assigned samples.  With a delay, it consumes the pending batches instead, and the
    assigned samples become pending.

    Args:
        assignment: the result of `assign` for this step.
        skipped: whether the committed update was empty because a member's gradient was not finite.
        absent: members whose contribution was empty; their batches are not consumed, but become late or,
            with a delay, stay pending.

    Raises:
        LocalProtocolError: `assignment` does not belong to this state.
    """
    total = count_samples(_newly_assigned(state, assignment))
    state = _take(spec, state, assignment)
    if spec.delay:
        contributed = [batch.spans for batch in state.pending if batch.peer not in absent]
        # With a delay, only a faulty member is absent.  Its pending batch stays pending, and the samples that
        # the step has assigned to it are re-queued.
        returned = [span for peer, spans in assignment.items() if peer in absent for span in spans]
        pending = [batch for batch in state.pending if batch.peer in absent]
        pending += [
            DeferredBatch(peer, spans, total, state.step)
            for peer, spans in assignment.items()
            if spans and peer not in absent
        ]
        state = replace(state, pending=tuple(sorted(pending, key=lambda batch: batch.peer)))
    else:
        contributed = [spans for peer, spans in assignment.items() if peer not in absent]
        known = {batch.peer: batch for batch in state.late}
        late = [
            known.get(peer) or DeferredBatch(peer, assignment[peer], total, state.step)
            for peer in sorted(absent)
        ]
        expired = [batch for batch in late if state.step - batch.step >= MAX_LATE_STEPS]
        returned = [span for batch in expired for span in batch.spans]
        late = [replace(batch, spans=()) if batch in expired else batch for batch in late]
        state = replace(state, late=tuple(late))
    consumed = sum(count_samples(spans) for spans in contributed)
    return _check_balanced(
        replace(
            state,
            step=state.step + 1,
            requeued=coalesce(spec, [*state.requeued, *returned]),
            consumed=state.consumed + consumed,
            skipped=state.skipped + (consumed if skipped else 0),
            holders=None,
        )
    )


def reassign(
    spec: LedgerSpec, state: LedgerState, assignment: Assignment, survivors: Collection[PeerId]
) -> LedgerState:
    """Return the state for the MembershipView that follows the abort of step `state.step`.

    Survivors keep exactly their positions, so they can use the gradients that they have computed.  The
    positions of the other members are re-queued; the next step assigns them first.  If no survivor has any
    positions, the step commits without samples, because a batch that a trainer has begun must not change.  If
    the step aborts again, call this function with the assignment of the new state.

    Args:
        assignment: the result of `assign` for the aborted step.
        survivors: members that are also in the next generation.

    Raises:
        LocalProtocolError: `assignment` does not belong to this state.
    """
    late = {batch.peer for batch in state.late}
    state = _take(spec, state, assignment)
    new = {peer: spans for peer, spans in assignment.items() if peer not in late}
    holders = {peer: spans for peer, spans in new.items() if peer in survivors and spans}
    lost = [span for peer, spans in new.items() if peer not in holders for span in spans]
    reassigned = replace(
        state,
        requeued=coalesce(spec, [*state.requeued, *lost]),
        holders=tuple(sorted(holders.items())),
    )
    return release_deferred(spec, reassigned, survivors)


def release_deferred(spec: LedgerSpec, state: LedgerState, survivors: Collection[PeerId]) -> LedgerState:
    """Return the ledger after re-queuing the late and pending batches and the leases of all members except
    `survivors`."""
    lost = [b for b in (*state.late, *state.pending) if b.peer not in survivors]
    spans = [span for batch in lost for span in batch.spans]
    spans += [span for peer, span in state.leases if peer not in survivors]
    if not lost and not spans:
        return _check_balanced(state)
    return _check_balanced(
        replace(
            state,
            requeued=coalesce(spec, [*state.requeued, *spans]),
            late=tuple(batch for batch in state.late if batch.peer in survivors),
            pending=tuple(batch for batch in state.pending if batch.peer in survivors),
            leases=tuple((peer, span) for peer, span in state.leases if peer in survivors),
        )
    )


def release_holders(spec: LedgerSpec, state: LedgerState) -> LedgerState:
    """Return the ledger after re-queuing all positions that are assigned to particular members."""
    held = [span for _, spans in state.holders or () for span in spans]
    released = replace(state, requeued=coalesce(spec, [*state.requeued, *held]), holders=None)
    return release_deferred(spec, released, ())


# -- spans ---------------------------------------------------------------------------------------


def _newly_assigned(state: LedgerState, assignment: Assignment) -> list[Span]:
    """Return the assigned spans that are not part of a late batch."""
    late = {batch.peer for batch in state.late}
    return [span for peer, spans in assignment.items() if peer not in late for span in spans]


def _split(total: int, shares: Sequence[int]) -> list[int]:
    """Split `total` samples in proportion to the shares, so that no member gets more than its share."""
    whole = max(1, sum(shares))
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(total * shares[rank] % whole), rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _rest_of_pass(spec: LedgerSpec, state: LedgerState) -> tuple[Span, ...]:
    """Return the positions from the cursor to the end of the pass; () once the last pass is assigned, and
    while members have leases in a pass that is fully assigned."""
    cursor = state.cursor
    is_last = spec.epochs is not None and cursor >= spec.epochs * spec.size
    if is_last or (state.leases and cursor % spec.size == 0):
        return ()
    return (Span(cursor, (cursor // spec.size + 1) * spec.size),)


def _hand_out(spec: LedgerSpec, state: LedgerState, counts: Sequence[tuple[PeerId, int]]) -> HandOut:
    return HandOut(spec, state, _rest_of_pass(spec, state), counts)


def _take(spec: LedgerSpec, state: LedgerState, assignment: Assignment) -> LedgerState:
    """Return the ledger after removing the newly assigned positions from the free, re-queued and leased ones.

    Raises:
        LocalProtocolError: the run has shards, and this state leads to a different assignment.
    """
    taken = _newly_assigned(state, assignment)
    if not spec.shards or state.holders is not None:
        cursor = max([state.cursor, *(span.stop for span in taken)])
        return replace(state, cursor=cursor, requeued=tuple(subtract(state.requeued, taken)))
    late = {batch.peer for batch in state.late}
    new = {peer: spans for peer, spans in assignment.items() if peer not in late}
    handed_out = _hand_out(spec, state, [(peer, count_samples(spans)) for peer, spans in new.items()])
    if {peer: tuple(spans) for peer, spans in handed_out.taken.items()} != new:
        raise LocalProtocolError(f"the assignment of step {state.step} belongs to another state")
    return handed_out.state


def is_balanced(state: LedgerState) -> bool:
    """Return whether the cursor equals the number of positions consumed, re-queued or held by members."""
    return state.cursor == state.consumed + count_samples(state.requeued) + _count_held(state)


def _count_held(state: LedgerState) -> int:
    """Return the number of samples that are assigned to particular members."""
    held = sum(count_samples(spans) for _, spans in state.holders or ())
    held += count_samples(span for _, span in state.leases)
    return held + sum(count_samples(batch.spans) for batch in (*state.late, *state.pending))


def is_sound_when_released(spec: LedgerSpec, state: LedgerState) -> bool:
    """Return whether the ledger of a checkpoint is sound after `release_holders`."""
    return is_balanced(state) and is_sound(spec, release_holders(spec, state), ())


def is_sound(spec: LedgerSpec, state: LedgerState, members: Collection[PeerId]) -> bool:
    """Return whether a correct member of this generation can hold `state`.

    Such a state balances (`is_balanced`).  No position occurs twice or lies beyond the cursor, and only
    members hold positions.  Batches are pending only in a run with a delay, and late only in a run without
    one; only a run with shards has leases.  No more samples are skipped than consumed, and the numbers in the
    state are so small that no run can make them overflow.
    """
    holders = [*(state.holders or ()), *((batch.peer, batch.spans) for batch in state.late)]
    pending = [(batch.peer, batch.spans) for batch in state.pending]
    leases = [(peer, (span,)) for peer, span in state.leases]
    held = (span for _, spans in (*holders, *pending, *leases) for span in spans)
    spans = sorted((*state.requeued, *held), key=lambda span: span.start)
    is_disjoint = all(one.stop <= other.start for one, other in pairwise(spans))
    is_inside = all(0 <= span.start < span.stop <= state.cursor for span in spans)
    is_known = all(
        len(dict(each)) == len(each) and all(peer in members for peer, _ in each)
        for each in (holders, pending, leases)
    )
    deferred = (*state.late, *state.pending)
    has_room = (
        max(state.step, state.cursor, *(batch.total_samples for batch in deferred)) <= MAX_POSITION // 2
    )
    is_plausible = is_known and has_room and state.skipped <= state.consumed
    is_plausible = is_plausible and not (state.late if spec.delay else state.pending)
    is_plausible = is_plausible and (bool(spec.shards) or not state.leases)
    return is_balanced(state) and is_disjoint and is_inside and is_plausible


def _check_balanced(state: LedgerState) -> LedgerState:
    """Return `state`, or raise `LocalProtocolError` if it does not balance."""
    if not is_balanced(state):
        requeued = count_samples(state.requeued)
        raise LocalProtocolError(
            f"the ledger does not balance at step {state.step}: cursor {state.cursor} != consumed "
            f"{state.consumed} + requeued {requeued} + held {_count_held(state)}; the assignment belongs "
            "to another state"
        )
    return state
