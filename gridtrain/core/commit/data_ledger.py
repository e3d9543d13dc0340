"""Which samples each worker processes in each step, so that every sample is in exactly one committed step.

Positions number the samples in the order in which the run assigns them: position p belongs to pass p //
size.  The sampler maps positions to samples, by a permutation of each pass from `LedgerSpec.seed`.

    size = 10, shares 2 + 2             |<------ pass 0 ------>|<- pass 1
    positions                           0 1 2 3 4 5 6 7 8 9   10 11 12 ..
    consumed by steps 0 and 1           # # # # # # # #
    step 2, the tail: a short one                       a b
    step 3 begins the next pass                               a a b b

The state is replicated.  It changes only where a step commits (`commit`), or where a VIEW follows an aborted
step (`reassign`); everything else is computed from it, equally on every worker, without a message.  An
invariant, which `commit` and `reassign` check:

    cursor == consumed + requeued + held by the members that a VIEW named

A share is a batch size in samples.  A step takes the sum of all shares, fewer where a pass ends: it goes from
the cursor at most to the end of the pass, so that no step has samples of two passes unless some are
re-queued.  A short step is split in proportion to the shares (largest remainder, ties to the lower rank):
filling rank after rank would leave the last ones idle while the first have full batches, and a step lasts as
long as its slowest worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gridtrain.core.messages import LedgerSpec, LedgerState, PeerId, Span
from gridtrain.errors import ConfigError, LocalProtocolError

MAX_POSITION = 2**63 - 1  # positions and counts travel as signed 64-bit integers

Assignment = Mapping[PeerId, tuple[Span, ...]]


def validate(spec: LedgerSpec) -> None:
    """Raise `ConfigError` unless `spec` describes a data set that is not empty and a run that ends."""
    if spec.size < 1:
        raise ConfigError(
            f"the data set has {spec.size} samples, at least 1 is needed",
            remedy="check the path or the filter that built the data set",
        )
    if not 0 <= spec.seed <= MAX_POSITION:
        raise ConfigError(f"the data seed is {spec.seed}; it must be >= 0 and < 2**63", remedy="try seed=0")
    if (spec.epochs is None) == (spec.steps is None):
        raise ConfigError(
            f"the run's end is epochs={spec.epochs}, steps={spec.steps}; exactly one must be given",
            remedy="give grid.batches either epochs= or steps=",
        )
    if spec.epochs is not None and not 1 <= spec.epochs * spec.size <= MAX_POSITION:
        raise ConfigError(
            f"epochs={spec.epochs} over {spec.size} samples; it must be at least 1 and below 2**63 samples",
            remedy="try epochs=1",
        )
    if spec.steps is not None and not 1 <= spec.steps <= MAX_POSITION:
        raise ConfigError(f"steps={spec.steps}; it must be >= 1 and < 2**63", remedy="try steps=1000")


def is_finished(spec: LedgerSpec, state: LedgerState) -> bool:
    """Whether the run is over: all passes consumed, or all steps committed."""
    if spec.epochs is not None:
        return state.consumed >= spec.epochs * spec.size
    return spec.steps is not None and state.step >= spec.steps


def count_samples(spans: Iterable[Span]) -> int:
    """Number of positions in `spans`."""
    return sum(span.stop - span.start for span in spans)


def assign(
    spec: LedgerSpec, state: LedgerState, shares: Sequence[tuple[PeerId, int]]
) -> dict[PeerId, tuple[Span, ...]]:
    """Assign the positions of step `state.step`.

    Args:
        shares: the generation's members in rank order, each with its share in samples.

    Returns:
        The spans of each member, in rank order.  Each lies within one pass; () means that the member takes
        part with a zero contribution.  In a finished run all are ().

    Raises:
        LocalProtocolError: the shares are invalid (a negative one, none above 0, a member twice), or a holder
            that a VIEW fixed is no member.
    """
    peers = [peer for peer, _ in shares]
    wanted = sum(share for _, share in shares)
    if len(set(peers)) != len(peers) or wanted < 1 or any(share < 0 for _, share in shares):
        raise LocalProtocolError(
            f"shares of step {state.step} are {[(peer.hex()[:8], share) for peer, share in shares]}; "
            "members must differ, shares be >= 0, and their sum >= 1"
        )
    if state.holders is not None:
        held = dict(state.holders)
        if strangers := held.keys() - set(peers):
            names = sorted(peer.hex()[:8] for peer in strangers)
            raise LocalProtocolError(f"step {state.step} has holders that are no members: {names}")
        return {peer: held.get(peer, ()) for peer in peers}
    if is_finished(spec, state):
        return {peer: () for peer in peers}

    queue = deque((*state.requeued, *_rest_of_pass(spec, state.cursor)))
    counts = _split(min(count_samples(queue), wanted), [share for _, share in shares])
    return {peer: _take_first(queue, count) for peer, count in zip(peers, counts, strict=True)}


def predict_assignments(
    spec: LedgerSpec, state: LedgerState, shares: Sequence[tuple[PeerId, int]], peer: PeerId, count: int
) -> list[tuple[Span, ...]]:
    """The spans of `peer` in the `count` steps after `state.step`, if all commit and no member joins or
    leaves."""
    ahead: list[tuple[Span, ...]] = []
    for _ in range(count):
        state = commit(spec, state, assign(spec, state, shares), skipped=False)
        if is_finished(spec, state):
            break
        ahead.append(assign(spec, state, shares)[peer])
    return ahead


def commit(spec: LedgerSpec, state: LedgerState, assignment: Assignment, *, skipped: bool) -> LedgerState:
    """The state after step `state.step` committed: exactly what was assigned is consumed.

    Args:
        assignment: what `assign` returned for this step.
        skipped: the committed update was empty, as a member's gradient was not finite.

    Raises:
        LocalProtocolError: `assignment` is not one of this state.
    """
    taken = [span for spans in assignment.values() for span in spans]
    return _check_balanced(
        replace(
            state,
            step=state.step + 1,
            cursor=_cursor_after(state, taken),
            requeued=_coalesce(spec, _subtract(state.requeued, taken)),
            consumed=state.consumed + count_samples(taken),
            skipped=state.skipped + (count_samples(taken) if skipped else 0),
            holders=None,
        )
    )


def reassign(
    spec: LedgerSpec, state: LedgerState, assignment: Assignment, survivors: Collection[PeerId]
) -> LedgerState:
    """The state after step `state.step` aborted and a VIEW follows; survivors keep their gradients.

    Survivors keep exactly their positions, and with them the gradients that they have computed; the others'
    are re-queued and assigned first in the next step.  If no survivor has any, the step commits without
    samples, as a batch that a trainer has begun must not change.  The step may abort again: call this with
    the assignment of the new state.

    Args:
        assignment: what `assign` returned for the aborted step.
        survivors: members that are also in the next generation.

    Raises:
        LocalProtocolError: `assignment` is not one of this state.
    """
    taken = [span for spans in assignment.values() for span in spans]
    holders = {peer: spans for peer, spans in assignment.items() if peer in survivors and spans}
    lost = [span for peer, spans in assignment.items() if peer not in holders for span in spans]
    return _check_balanced(
        replace(
            state,
            cursor=_cursor_after(state, taken),
            requeued=_coalesce(spec, [*_subtract(state.requeued, taken), *lost]),
            holders=tuple(sorted(holders.items())),
        )
    )


def release_holders(spec: LedgerSpec, state: LedgerState) -> LedgerState:
    """The same state for another group of workers: positions held for single members are re-queued."""
    held = [span for _, spans in state.holders or () for span in spans]
    return _check_balanced(replace(state, requeued=_coalesce(spec, [*state.requeued, *held]), holders=None))


# -- spans ---------------------------------------------------------------------------------------


def _take_first(queue: deque[Span], count: int) -> tuple[Span, ...]:
    """Remove the first `count` positions from the queue, or all if it has fewer."""
    taken: list[Span] = []
    while count > 0 and queue:
        span = queue.popleft()
        stop = min(span.stop, span.start + count)
        taken.append(Span(span.start, stop))
        count -= stop - span.start
        if stop < span.stop:
            queue.appendleft(Span(stop, span.stop))
    return tuple(taken)


def _split(total: int, shares: Sequence[int]) -> list[int]:
    """Split `total` samples in proportion to the shares; no member gets more than its share."""
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(total * shares[rank] % whole), rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _rest_of_pass(spec: LedgerSpec, cursor: int) -> tuple[Span, ...]:
    """From the cursor to the end of its pass; () once the run's last pass is assigned."""
    if spec.epochs is not None and cursor >= spec.epochs * spec.size:
        return ()
    return (Span(cursor, (cursor // spec.size + 1) * spec.size),)


def _coalesce(spec: LedgerSpec, spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort, and join adjacent spans, but never across the end of a pass."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and joined[-1].stop == span.start and span.start % spec.size != 0:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


def _subtract(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """The positions of `spans` that are not in `taken`."""
    holes = sorted(taken, key=lambda span: span.start)
    rest: list[Span] = []
    for span in spans:
        start = span.start
        for hole in holes:
            if hole.stop <= start or hole.start >= span.stop:
                continue
            if hole.start > start:
                rest.append(Span(start, hole.start))
            start = hole.stop
        if start < span.stop:
            rest.append(Span(start, span.stop))
    return rest


def _cursor_after(state: LedgerState, taken: Iterable[Span]) -> int:
    return max(state.cursor, *(span.stop for span in taken), 0)


def is_balanced(state: LedgerState) -> bool:
    """Whether every position below the cursor is accounted for exactly once."""
    held = sum(count_samples(spans) for _, spans in state.holders or ())
    return state.cursor == state.consumed + count_samples(state.requeued) + held


def is_sound(state: LedgerState, members: Collection[PeerId]) -> bool:
    """Whether an honest member of this generation may hold `state`; checked as others compute with it.

    No position below the cursor occurs twice, none is beyond it, only members are holders, and the numbers
    are far enough from overflow for more steps than any run takes.
    """
    holders = state.holders or ()
    spans = sorted((*state.requeued, *(s for _, held in holders for s in held)), key=lambda s: s.start)
    is_disjoint = all(one.stop <= other.start for one, other in pairwise(spans))
    is_inside = all(0 <= span.start < span.stop <= state.cursor for span in spans)
    is_known = len(dict(holders)) == len(holders) and all(peer in members for peer, _ in holders)
    has_room = max(state.step, state.cursor) <= MAX_POSITION // 2
    is_plausible = is_known and has_room and state.skipped <= state.consumed
    return is_balanced(state) and is_disjoint and is_inside and is_plausible


def _check_balanced(state: LedgerState) -> LedgerState:
    """Return `state`; raises `LocalProtocolError` if it does not balance."""
    if not is_balanced(state):
        held = sum(count_samples(spans) for _, spans in state.holders or ())
        requeued = count_samples(state.requeued)
        raise LocalProtocolError(
            f"the ledger does not balance at step {state.step}: cursor {state.cursor} != consumed "
            f"{state.consumed} + requeued {requeued} + held {held}; the assignment is not this state's"
        )
    return state
