"""The residual's book-keeping: nothing is lost at a commit, nothing changes at an abort."""

import numpy as np
import pytest
import torch

from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.network.wire.sparse_payload import decode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify import cpu_selection
from gridtrain.sparsify.error_feedback import ErrorFeedback

FP16, FP32 = ValueKind.FP16, ValueKind.FP32


def dense(payload, n, kind):
    sparse = decode(payload, n=n, max_entries=n, kind=kind)
    out = torch.zeros(n)
    out[torch.from_numpy(sparse.indices)] = torch.from_numpy(sparse.values)
    return out


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_two_steps_by_eye():
    feedback = ErrorFeedback(4, "cpu")
    #                                acc               sent              residual after
    for contribution, sent, left in [
        (vector(1, -4, 2, 3), vector(0, -4, 0, 3), vector(1, 0, 2, 0)),
        (vector(2, 1, 0, 1), vector(3, 0, 2, 0), vector(0, 1, 0, 1)),
    ]:
        prepared = feedback.prepare(contribution, 2, FP16)
        assert dense(prepared.payload, 4, FP16).tolist() == sent.tolist()
        feedback.commit(prepared, [])
        assert feedback.residual_N.tolist() == left.tolist()


def test_what_merges_keep_comes_back():
    feedback = ErrorFeedback(4, "cpu")
    prepared = feedback.prepare(vector(8, 0, 0, 1), 1, FP16)
    kept = [
        (np.array([0, 2]), np.array([0.5, -1], np.float32)),
        (np.array([0]), np.array([0.25], np.float32)),
    ]
    feedback.commit(prepared, kept)
    assert feedback.residual_N.tolist() == [0.75, 0, -1, 1]


def index_add_of_cuda(target, dim, where, values, *, alpha=1):
    """Adds by atomic operations, which replace subnormal numbers by zeros."""
    total = target.index_select(dim, where).add_(values, alpha=alpha)
    total[total.abs() < torch.finfo(torch.float32).tiny] = 0.0
    return target.index_copy_(dim, where, total)


def test_subnormal_numbers_are_kept_on_all_devices(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "index_add_", index_add_of_cuda)
    feedback = ErrorFeedback(4, "cpu")
    prepared = feedback.prepare(vector(8, 3e-39, 0, 1), 1, FP32)
    kept = [(np.array([1, 2]), np.array([4e-39, -2e-39], np.float32))]
    feedback.commit(prepared, kept)
    expected = vector(0, 3e-39, 0, 1) + vector(0, 4e-39, -2e-39, 0)
    assert torch.equal(feedback.residual_N, expected) and expected[1] > 0 > expected[2]


def test_an_abort_leaves_every_bit_and_a_retry_gives_the_same_payload():
    torch.manual_seed(0)
    feedback = ErrorFeedback(100, "cpu", momentum=0.9)
    feedback.commit(feedback.prepare(torch.randn(100), 7, FP16), [])
    residual, u = feedback.residual_N.clone(), feedback.u_N.clone()
    contribution = torch.randn(100)
    first = feedback.prepare(contribution, 7, FP16)
    assert torch.equal(feedback.residual_N, residual) and torch.equal(feedback.u_N, u)
    assert feedback.prepare(contribution, 7, FP16).payload == first.payload


@pytest.mark.parametrize("kind", ValueKind)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_nothing_is_lost_at_a_commit(kind, momentum, k):
    """residual after + sent == residual before + added, where added is the contribution or the new u."""
    seed = hash((int(kind), momentum, k)) % 1000
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(64, "cpu", momentum)
    u = torch.zeros(64)
    for step in range(20):
        scale = torch.randint(-12, 12, (64,), generator=generator)
        contribution = torch.randn(64, generator=generator) * torch.exp2(scale)  # wide range
        before = feedback.residual_N.double()
        u = u * momentum + contribution
        prepared = feedback.prepare(contribution, k, kind)
        feedback.commit(prepared, [])
        sent = dense(prepared.payload, 64, kind)
        error = (feedback.residual_N.double() + sent.double()) - (before + u.double())
        bound = 2.0**-23 * (before.abs() + u.double().abs())  # of the one addition
        assert (error.abs() <= bound).all(), f"{seed=} {step=}"
        if momentum:
            u[torch.from_numpy(prepared.decoded.indices)] = 0.0
            assert torch.equal(feedback.u_N, u), f"{seed=} {step=}"


@pytest.mark.parametrize("kind", [ValueKind.INT4, ValueKind.INT2])
def test_what_is_too_small_for_its_block_is_not_sent(kind):
    feedback = ErrorFeedback(4, "cpu", momentum=0.5)
    prepared = feedback.prepare(vector(8, 0.25, 4, 0), 3, kind)
    sent = dense(prepared.payload, 4, kind)
    assert prepared.decoded.indices.tolist() == [0, 2] and sent[0] == 8 and 2 <= sent[2] <= 8
    feedback.commit(prepared, [])
    assert feedback.residual_N.tolist() == [0, 0.25, 4 - sent[2], 0]
    assert feedback.u_N.tolist() == [0, 0.25, 0, 0]


def test_integers_conserve_exactly():
    generator = torch.Generator().manual_seed(3)
    feedback = ErrorFeedback(50, "cpu", momentum=0.5)
    u = torch.zeros(50)
    for step in range(10):
        contribution = torch.randint(-(2**12), 2**12, (50,), generator=generator).float()
        before = feedback.residual_N.clone()
        u = 0.5 * u + contribution
        prepared = feedback.prepare(contribution, 6, FP16)
        feedback.commit(prepared, [])
        sent = dense(prepared.payload, 50, FP16)
        assert torch.equal(feedback.residual_N + sent, before + u), f"{step=}"
        u[sent != 0] = 0.0


def test_a_skip_sends_nothing_and_changes_nothing():
    feedback = ErrorFeedback(4, "cpu", momentum=0.9)
    feedback.commit(feedback.prepare(vector(1, 2, 3, 4), 1, FP16), [])
    residual, u = feedback.residual_N.clone(), feedback.u_N.clone()
    prepared = feedback.prepare_skip(FP16)
    assert dense(prepared.payload, 4, FP16).tolist() == [0, 0, 0, 0]
    feedback.commit(prepared, [])
    assert torch.equal(feedback.residual_N, residual) and torch.equal(feedback.u_N, u)


def test_an_overflow_of_the_sum_is_a_skip():
    feedback = ErrorFeedback(3, "cpu")
    feedback.commit(feedback.prepare(vector(3e38, 3.2e38, 0), 1, FP16), [])
    assert feedback.prepare(vector(3e38, 0, 0), 1, FP16).skip


def test_what_could_overflow_in_a_merge_is_a_skip():
    feedback = ErrorFeedback(3, "cpu")
    assert not feedback.prepare(vector(7, 1, 0), 1, FP16, limit=7.0).skip
    assert feedback.prepare(vector(7, -8, 0), 1, FP16, limit=7.0).skip


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_goes_on_where_it_was(momentum):
    torch.manual_seed(1)
    one, other = ErrorFeedback(30, "cpu", momentum), ErrorFeedback(30, "cpu", momentum)
    one.commit(one.prepare(torch.randn(30), 3, FP16), [])
    other.load(one.state())
    contribution = torch.randn(30)
    assert one.prepare(contribution, 3, FP16).payload == other.prepare(contribution, 3, FP16).payload


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_is_forgotten_is_zero_as_at_the_beginning(momentum):
    feedback = ErrorFeedback(4, "cpu", momentum)
    feedback.commit(feedback.prepare(vector(1, 2, 3, 4), 1, FP16), [])
    assert feedback.residual_N.any()
    feedback.clear()
    fresh = ErrorFeedback(4, "cpu", momentum)
    assert all(torch.equal(value, fresh.state()[name]) for name, value in feedback.state().items())


def test_state_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="7 elements"):
        ErrorFeedback(7, "cpu").load(ErrorFeedback(8, "cpu").state())
    with pytest.raises(ConfigError, match=r"momentum 0\.9"):
        ErrorFeedback(8, "cpu", 0.9).load(ErrorFeedback(8, "cpu").state())


# -- folded in: the weight, what is not finite, blocks, parts ------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(cpu_selection, "BLOCK", 32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_that_is_not_finite_is_a_skip(small_blocks, momentum, value):
    feedback = ErrorFeedback(100, "cpu", momentum)
    feedback.commit(feedback.prepare(torch.randn(100), 3, FP16), [])
    residual = feedback.residual_N.clone()
    for where in (0, 50, 99):
        gradient = torch.randn(100)
        gradient[where] = value
        prepared = feedback.prepare(gradient, 3, FP16, weight=0.5)
        assert prepared.skip and dense(prepared.payload, 100, FP16).count_nonzero() == 0
        feedback.commit(prepared, [])
        assert torch.equal(feedback.residual_N, residual)
    assert not feedback.prepare(torch.full((100,), value), 3, FP16, weight=0.0).skip  # not read at all


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_weight_folded_in_changes_no_bit(small_blocks, momentum):
    torch.manual_seed(2)
    one, other = ErrorFeedback(100, "cpu", momentum), ErrorFeedback(100, "cpu", momentum)
    for weight in (1 / 3, 0.7, 1.0, 0.0, 1e-3):
        gradient = torch.randn(100)
        mine = one.prepare(gradient, 7, FP16, weight=weight)
        theirs = other.prepare(gradient * weight, 7, FP16)
        one.commit(mine, [])
        other.commit(theirs, [])
        assert mine.payload == theirs.payload
        assert torch.equal(one.residual_N, other.residual_N)
        assert momentum == 0.0 or torch.equal(one.u_N, other.u_N)


def test_an_abort_leaves_every_block_bit_equal(small_blocks):
    torch.manual_seed(3)
    feedback = ErrorFeedback(500, "cpu", momentum=0.9)
    feedback.commit(feedback.prepare(torch.randn(500), 7, FP16), [])
    bits, u_bits = feedback.residual_N.view(torch.int32).clone(), feedback.u_N.view(torch.int32).clone()
    for attempt in range(4):  # each starts from another carried threshold
        feedback.prepare(torch.randn(500) * 10.0 ** (attempt - 2), 7, FP16, weight=0.3)
        assert torch.equal(feedback.residual_N.view(torch.int32), bits)
        assert torch.equal(feedback.u_N.view(torch.int32), u_bits)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_parts_conserve_exactly(small_blocks, momentum):
    """Integers and powers of two: the sum of what is kept and sent is exact, over unequal parts."""
    generator = torch.Generator().manual_seed(4)
    feedback = ErrorFeedback(200, "cpu", momentum)
    u = torch.zeros(200)
    bounds = [(150, 200), (1, 150), (0, 1)]  # in the order of backward: the last layers first
    for step in range(8):
        gradient = torch.randint(-(2**10), 2**10, (200,), generator=generator).float()
        before, u = feedback.residual_N.clone(), momentum * u + 0.5 * gradient
        parts, sent = [], torch.zeros(200)
        for start, stop in bounds:
            prepared = feedback.prepare(gradient[start:stop], 1, FP32, weight=0.5, start=start)
            mine = dense(prepared.payload, stop - start, FP32)
            assert mine.count_nonzero() <= 1
            sent[start:stop] += mine
            kept = np.array([0], np.int64), np.array([4.0], np.float32)  # a merge dropped 4 at its start
            sent[start] -= 4.0
            parts.append((prepared, [kept]))
            assert torch.equal(feedback.residual_N, before), "nothing is committed yet"
        selected = sent.clone()
        selected[[start for start, _ in bounds]] += 4.0
        feedback.commit_parts(parts)
        assert torch.equal(feedback.residual_N + sent, before + u), f"{step=}"
        u[selected != 0] = 0.0
        assert momentum == 0.0 or torch.equal(feedback.u_N, u)


def test_a_skip_in_one_part_skips_all():
    feedback = ErrorFeedback(4, "cpu")
    residual = feedback.residual_N.clone()
    good = feedback.prepare(vector(1, 2), 1, FP16)
    bad = feedback.prepare(vector(float("nan"), 2), 1, FP16, start=2)
    assert (good.skip, bad.skip) == (False, True)
    assert dense(bad.payload, 2, FP16).tolist() == [0, 0]
    feedback.commit_parts([(good, []), (bad, [])])
    assert torch.equal(feedback.residual_N, residual)


def test_parts_that_are_not_the_whole_are_our_own_bug():
    feedback = ErrorFeedback(4, "cpu")
    first, second = feedback.prepare(vector(1, 2), 1, FP16), feedback.prepare(vector(3, 4), 1, FP16, start=2)
    for parts in ([first], [second], [first, first], [first, second, second], []):
        with pytest.raises(LocalProtocolError, match="must cover"):
            feedback.commit_parts([(part, []) for part in parts])
    assert feedback.residual_N.tolist() == [0, 0, 0, 0]
    feedback.commit_parts([(second, []), (first, [])])
    assert feedback.residual_N.tolist() == [1, 0, 3, 0]
    with pytest.raises(LocalProtocolError, match="another round"):
        feedback.commit_parts([(first, []), (second, [])])
    with pytest.raises(LocalProtocolError, match=r"part 3 \.\. 5 .* residual's 4 elements"):
        feedback.prepare(vector(1, 2), 1, FP16, start=3)


def test_another_residual_is_added_as_a_whole_or_not_at_all():
    feedback = ErrorFeedback(4, "cpu")
    where = np.array([0, 2])
    assert feedback.add_residual(where, np.array([1.5, -2.0], np.float32), limit=2.0) is True
    assert feedback.residual_N.tolist() == [1.5, 0, -2, 0]
    assert feedback.add_residual(where, np.array([0.0, -0.5], np.float32), limit=2.0) is False
    assert feedback.residual_N.tolist() == [1.5, 0, -2, 0]
