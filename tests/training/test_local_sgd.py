"""LocalSteps: workers train alone for some steps; after each exchange all have the same parameters, and the
rest of each change is in the residual."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_classifier import adamw, backward, sgd, small_model, train_step
from torch import nn

from gridtrain.config import Dense, GTopK, LocalSteps, TopK
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.state_transfer.update_log import StepUpdate
from gridtrain.training.checkpoint import flat_gradient
from gridtrain.training.checkpoint.flat_gradient import FlatGradient, exchange_device
from gridtrain.training.checkpoint.serialization import replica_digest
from gridtrain.training.grad_scaler import GridScaler
from gridtrain.training.local_sgd import LocalSGDOptimizer, OuterOptimizer, is_finite
from gridtrain.training.optimizer import GridOptimizer

EXCHANGES = [Dense(), TopK(density=0.1), GTopK(density=0.1)]
EVERY = 3


def wrap(session, model, exchange, inner=None, *, every=EVERY, **outer):
    inner = inner or adamw(model)
    return LocalSGDOptimizer(inner, model, LocalSteps(every, exchange, **outer), session)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# -- guarantee 1 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_all_workers_have_the_same_bits_after_every_exchange(network, exchange, world_size, momentum):
    def worker(session):
        model = small_model()
        inner = adamw(model)
        optimizer = wrap(session, model, exchange, inner, outer_learning_rate=0.7, outer_momentum=momentum)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        shared, moments = [], []
        for step in range(5 * EVERY):
            train_step(model, optimizer, 100 * step + session.rank)
            scheduler.step()
            if (step + 1) % EVERY == 0:
                shared.append(replica_digest(model, optimizer.replicated))
                moments.append(inner.state_dict()["state"][0]["exp_avg"].sum().item())
        return shared, moments

    group = network(samples=range(1, world_size + 1), aborts={(1, 0), (3, 0), (3, 1)})
    results = group.train(worker)
    assert group.step == 5, "one round for every three steps"
    assert len({tuple(shared) for shared, _ in results}) == 1
    assert len(set(results[0][0])) == 5, "every exchange moved the model"
    assert len({tuple(moments) for _, moments in results}) == world_size, "moments are each worker's own"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("local", [False, True])
def test_the_exchange_gives_the_same_bits_in_host_memory(network, local, dtype, device):
    exchange = GTopK(density=0.5, momentum=0.0 if local else 0.5)

    def worker(session, exchange_device):
        model = small_model(dtype).to(device)
        options = {"exchange_device": exchange_device}
        if local:
            turns = LocalSteps(EVERY, exchange, outer_momentum=0.9)
            optimizer = LocalSGDOptimizer(adamw(model), model, turns, session, **options)
        else:
            optimizer = GridOptimizer(sgd(model), model, exchange, session, **options)
        for step in range(4 * EVERY):
            train_step(model, optimizer, 100 * step + session.rank)
        tensors = [
            optimizer._flat.flat_N,
            optimizer._exchanger.feedback.residual_N,
            *getattr(optimizer, "_anchor", []),
        ]
        assert {each.device.type for each in tensors} == {exchange_device or device}
        return flat(model).cpu()

    usual, on_host = (
        network(world_size=2).train(lambda session, where=where: worker(session, where))
        for where in (None, "cpu")
    )
    assert all(torch.equal(one, other) for one, other in zip(usual, on_host, strict=True))


def test_the_exchange_on_another_device_is_refused(network):
    model = small_model()
    with pytest.raises(ConfigError, match=r"exchange_device is cuda:1; .* the model's device, cpu"):
        GridOptimizer(sgd(model), model, Dense(), network().session(), exchange_device="cuda:1")


@pytest.mark.parametrize(
    ("asked", "own", "chosen"),
    [
        ("cpu", "cuda:0", "cpu"),
        (torch.device("cpu"), "cpu", "cpu"),
        ("cuda", "cuda:1", "cuda:1"),
        (torch.device("cuda", 0), "cuda:0", "cuda:0"),
        ("cuda", "cuda:0", None),
        ("cuda:1", "cuda:0", None),
        ("host", "cuda:0", None),
    ],
)
def test_a_device_without_an_index_is_the_current_one(monkeypatch, asked, own, chosen):
    monkeypatch.setattr(
        torch, "empty", lambda *_, device: SimpleNamespace(device=torch.device(device.type, 1))
    )
    if chosen is not None:
        assert exchange_device(asked, torch.device(own)) == torch.device(chosen)
        return
    with pytest.raises(ConfigError, match=rf"exchange_device is {asked}; .* the model's device, {own}"):
        exchange_device(asked, torch.device(own))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_trained(network, dtype):
    def worker(session):
        model = small_model(dtype)
        optimizer = wrap(session, model, Dense(), sgd(model, lr=0.3))
        for step in range(2 * EVERY):
            train_step(model, optimizer, 10 * step + session.rank)
        assert next(model.parameters()).dtype == dtype
        return replica_digest(model, optimizer.replicated)

    assert len(set(network(3).train(worker))) == 1


# -- the algorithm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_local_step_without_an_outer_optimizer_is_dense_sgd(network, world_size):
    def worker(session, local):
        model = small_model()
        inner = sgd(model)
        if local:
            optimizer = wrap(session, model, Dense(), inner, every=1)
        else:
            optimizer = GridOptimizer(inner, model, Dense(), session)
        for step in range(12):
            train_step(model, optimizer, 10 * step + session.rank)
        return flat(model)

    samples = range(1, world_size + 1)
    local = network(samples=samples).train(lambda session: worker(session, True))
    dense = network(samples=samples).train(lambda session: worker(session, False))
    for ours, theirs in zip(local, dense, strict=True):
        assert (ours - theirs).abs().max() < 2e-6


@pytest.mark.parametrize("rate, momentum", [(1.0, 0.0), (0.7, 0.9)])
def test_the_algorithm_is_diloco_as_published(network, rate, momentum):
    """Algorithm 1 with torch's SGD(nesterov=True) as outer optimizer; the mean is weighted by samples."""
    samples, rounds = [1, 3, 2], 4

    def worker(session):
        model = small_model()
        optimizer = wrap(session, model, Dense(), outer_learning_rate=rate, outer_momentum=momentum)
        for step in range(rounds * EVERY):
            train_step(model, optimizer, 10 * step + session.rank)
        return flat(model)

    whole = small_model()
    outer = sgd(whole, lr=rate, momentum=momentum, nesterov=momentum > 0)
    copies = [small_model() for _ in samples]
    inners = [adamw(model) for model in copies]
    for number in range(rounds):
        outer.zero_grad(set_to_none=False)
        for rank, (model, inner) in enumerate(zip(copies, inners, strict=True)):
            model.load_state_dict(whole.state_dict())
            for step in range(number * EVERY, (number + 1) * EVERY):
                train_step(model, inner, 10 * step + rank)
            for shared, own in zip(whole.parameters(), model.parameters(), strict=True):
                part = (shared.detach() - own.detach()) * samples[rank] / sum(samples)
                shared.grad = part if shared.grad is None else shared.grad + part
        outer.step()
    for ours in network(samples=samples).train(worker):
        assert (ours - flat(whole)).abs().max() < 1e-5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_has_the_same_bits_for_any_block_size_and_layout(monkeypatch, momentum, dtype):
    """Workers may have other numbers of threads, and the parameters of some in channels_last."""
    where = np.arange(1, 310, 7)
    updates = [SparseVector(where, np.linspace(-1, 1, where.size, dtype=np.float32) / k) for k in (3, 5)]
    dense = [np.zeros(310, np.float32) for _ in updates]
    for full_N, update in zip(dense, updates, strict=True):
        full_N[update.indices] = update.values

    def moved(block, layout, form):
        monkeypatch.setattr(flat_gradient, "_BLOCK", block)
        torch.manual_seed(0)
        model = nn.Conv2d(3, 10, (2, 5), dtype=dtype).to(memory_format=layout)
        outer = OuterOptimizer(
            sgd(model),
            FlatGradient(model, sgd(model)),
            LocalSteps(2, Dense(), outer_learning_rate=0.7, outer_momentum=momentum),
        )
        for update in form:
            outer.update = update
            outer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    expected = moved(1 << 16, torch.contiguous_format, updates)
    assert not torch.equal(expected, moved(1 << 16, torch.contiguous_format, []))
    for block in (1, 13, 1 << 16):
        for layout in (torch.contiguous_format, torch.channels_last):
            for form in (updates, dense):
                assert torch.equal(moved(block, layout, form), expected), f"{block=} {layout}"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_update_keeps_subnormal_numbers_on_all_devices(monkeypatch, momentum):
    def index_add_of_cuda(target, dim, where, values, *, alpha=1):
        total = target.index_select(dim, where).add_(values, alpha=alpha)
        total[total.abs() < torch.finfo(torch.float32).tiny] = 0.0
        return target.index_copy_(dim, where, total)

    monkeypatch.setattr(torch.Tensor, "index_add_", index_add_of_cuda)
    model = nn.ParameterList([nn.Parameter(torch.tensor([9e-39, 1.0]))])
    inner = sgd(model)
    exchange = LocalSteps(2, outer_learning_rate=1.0, outer_momentum=momentum)
    outer = OuterOptimizer(inner, FlatGradient(model, inner), exchange)
    outer.update = SparseVector(np.array([0]), np.array([2e-39], np.float32))
    outer.step()
    assert model[0].tolist() == pytest.approx([9e-39 - 2e-39 * (1 + momentum), 1.0], rel=1e-5, abs=0.0)


@pytest.mark.parametrize("last, finite", [(3e38, True), (math.inf, False), (math.nan, False)])
def test_a_change_whose_sum_overflows_is_finite(last, finite):
    values_N = torch.tensor([3e38, 3e38, last])
    assert is_finite(values_N, [values_N[:1].sum(), values_N[1:].sum()]) is finite


def test_a_turn_with_few_samples_trains_less(network):
    """Only the first of three calls has samples; the placeholders of the others change nothing."""
    model, twin = small_model(), small_model()
    optimizer, plain = wrap(network().session(), model, Dense()), adamw(twin)
    optimizer.begin_turn(1)
    for step in range(EVERY):
        train_step(model, optimizer, step)
    train_step(twin, plain, 0)
    assert (flat(model) - flat(twin)).abs().max() < 1e-6
    optimizer.begin_turn(EVERY)
    before = flat(model)
    train_step(model, optimizer, 7)
    assert not torch.equal(flat(model), before)


# -- guarantee 2 ---------------------------------------------------------------------------------------


def integers(step, rank, n):
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randint(-9, 10, (n,), generator=generator).float() * 4.0


@pytest.mark.parametrize("exchange", EXCHANGES[1:], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_no_part_of_a_change_is_lost(network, exchange, world_size):
    """Integers over a power of two: residuals after + update == residuals before + changes, exactly."""
    n, rounds = 60, 6

    def worker(session):
        parameter = nn.Parameter(torch.zeros(n))
        model = nn.ParameterList([parameter])
        optimizer = wrap(session, model, exchange, torch.optim.SGD([parameter], lr=1.0))
        history = []
        for number in range(rounds):
            before, anchor, change = optimizer.residual.state()["residual"], flat(model), torch.zeros(n)
            for step in range(number * EVERY, (number + 1) * EVERY):
                parameter.grad = integers(step, session.rank, n)
                change += parameter.grad
                optimizer.step()
            after, update = optimizer.residual.state()["residual"], anchor - flat(model)
            history.append((before, change / world_size, update, after))
        return history

    results = network(world_size, aborts={(1, 0), (4, 0)}).train(worker)
    moved = False
    for of_ranks in zip(*results, strict=True):
        before, added, updates, after = (torch.stack(c).double() for c in zip(*of_ranks, strict=True))
        assert torch.equal(after.sum(0) + updates[0], before.sum(0) + added.sum(0))
        moved |= bool(updates[0].any())
    assert moved


def test_an_abort_keeps_the_residual_and_the_change(network):
    def worker(session):
        model = small_model()
        optimizer = wrap(session, model, GTopK(density=0.1))
        begin, seen = session.begin, []

        def look():
            seen.append((optimizer.residual.state()["residual"], flat(model), optimizer._flat.flat_N.clone()))
            return begin()

        session.begin = look
        anchors = [flat(model)]
        for step in range(3 * EVERY):
            train_step(model, optimizer, 10 * step + session.rank)
            if (step + 1) % EVERY == 0:
                anchors.append(flat(model))
        return seen, anchors, replica_digest(model, optimizer.replicated)

    smooth = network(2).train(worker)
    rough = network(2, aborts={(1, 0), (1, 1)}).train(worker)
    for (seen, anchors, after), (_, _, smooth_after) in zip(rough, smooth, strict=True):
        assert len(seen) == 5  # round 0, three attempts at round 1, round 2
        for retry in (2, 3):
            assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[retry], strict=True))
        for attempt, number in enumerate((0, 1, 1, 1, 2)):
            assert torch.equal(seen[attempt][1], anchors[number]), "a newcomer now receives the anchor"
        assert after == smooth_after


# -- faults on one worker --------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", [0, 1, EVERY - 1])
def test_parameters_that_are_not_finite_skip_the_round_on_all(network, exchange, at, caplog):
    def worker(session):
        model = small_model()
        inner = adamw(model)
        optimizer = wrap(session, model, exchange, inner, outer_momentum=0.5)
        for step in range(EVERY):
            train_step(model, optimizer, 10 * step + session.rank)
        before, residual = replica_digest(model, optimizer.replicated), optimizer.residual.state()
        for step in range(EVERY):
            backward(model, 900 + 10 * step + session.rank)
            if session.rank == 1 and step == at:
                model[2].bias.grad[1] = math.nan
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.last_skipped and optimizer.skipped_steps == 1
        assert replica_digest(model, optimizer.replicated) == before, "all are back at the anchor"
        assert all(torch.equal(t, residual[name]) for name, t in optimizer.residual.state().items())
        assert bool(inner.state_dict()["state"]) == (session.rank != 1), "its moments were not finite"
        for step in range(EVERY):
            train_step(model, optimizer, 70 * step + session.rank)
        assert not optimizer.last_skipped and torch.isfinite(flat(model)).all()
        return replica_digest(model, optimizer.replicated)

    assert len(set(network(3).train(worker))) == 1
    assert caplog.text.count("parameters are not finite after 3 local steps") == 1


def test_an_overflow_costs_one_local_step_and_no_exchange(network):
    """Each worker's GradScaler is its own: only rank 1 backs off, and the round commits."""

    def worker(session):
        model = small_model()
        optimizer = wrap(session, model, Dense(), sgd(model))
        scaler = GridScaler(device="cpu", init_scale=1024.0)
        seen = []
        for step in range(EVERY):
            generator = torch.Generator().manual_seed(step)
            loss = model(torch.randn(4, 5, generator=generator)).square().mean()
            scaler.scale(loss).backward()
            if session.rank == 1 and step == EVERY - 1:
                model[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        return seen, optimizer.skipped_steps, replica_digest(model, optimizer.replicated)

    group = network(2)
    (calm, _, one), (backed_off, skipped, other) = group.train(worker)
    assert calm == [1024.0] * 3 and backed_off == [1024.0, 1024.0, 512.0]
    assert (group.step, skipped, one) == (1, 0, other)


def test_scaled_gradients_are_unscaled_for_the_local_steps(network):
    model, twin = small_model(), small_model()
    optimizer = wrap(network().session(), model, Dense(), sgd(model))
    scaler, plain = GridScaler(device="cpu", init_scale=1024.0), sgd(twin)
    for step in range(EVERY):
        inputs = torch.full((2, 5), 0.1 * (step + 1))
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        twin(inputs).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert (flat(model) - flat(twin)).abs().max() < 1e-6


def test_a_step_with_different_learning_rates_never_commits(network):
    def worker(session):
        model = small_model()
        optimizer = wrap(session, model, Dense(), sgd(model, lr=0.1 + 0.1 * session.rank))
        for step in range(EVERY):
            train_step(model, optimizer, step)

    with pytest.raises(ConfigError, match=r"rank 1 has lr=0\.2, but 1 of 2 workers \(rank 0\) has lr=0\.1"):
        network(2).train(worker)


# -- newcomers and checkpoints ---------------------------------------------------------------------------


def trained(network, *, momentum=0.9, rounds=2):
    model = small_model()
    optimizer = wrap(network().session(), model, GTopK(density=0.2), outer_momentum=momentum)
    for step in range(rounds * EVERY):
        train_step(model, optimizer, step)
    return model, optimizer


def test_a_newcomer_receives_parameters_and_velocity_but_no_moments(network):
    model, optimizer = trained(network)
    fresh = small_model()
    newcomer = wrap(network().session(), fresh, GTopK(density=0.2), outer_momentum=0.9)
    newcomer.restore_state(optimizer.capture_state())
    assert replica_digest(fresh, newcomer.replicated) == replica_digest(model, optimizer.replicated)
    assert not newcomer.inner.state_dict()["state"]
    for one, wrapped in ((model, optimizer), (fresh, newcomer)):
        moments = wrapped.inner.state_dict()["state"]
        wrapped.restore_state(optimizer.capture_state())
        assert wrapped.inner.state_dict()["state"].keys() == moments.keys(), "a state does not change moments"
        assert replica_digest(one, wrapped.replicated) == replica_digest(model, optimizer.replicated)


def test_a_state_that_is_captured_during_local_steps_is_that_of_the_last_exchange(network):
    model, optimizer = trained(network)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.track(scheduler=scheduler)
    session, local, captured = optimizer._session, [], []
    before, shared = optimizer.capture_state(), flat(model)
    session.is_in_turn = True

    def serve_state(may_copy):
        assert may_copy()
        captured.append(optimizer.capture_state())
        local.append(flat(model))

    session.serve_state = serve_state
    optimizer.begin_turn(EVERY)
    for step in range(EVERY):
        train_step(model, optimizer, step)
        scheduler.step()
    assert captured == [before] * (EVERY - 1)
    assert not any(torch.equal(shared, each) for each in local)


def test_a_state_that_is_loaded_after_an_interrupted_turn_is_the_one_that_is_sent(network):
    other, source = trained(network)
    model, optimizer = trained(network)
    train_step(other, source, 7)
    source.abort_turn()
    for step in range(EVERY):
        train_step(other, source, step)
    optimizer.begin_turn(EVERY)
    train_step(model, optimizer, 0)
    optimizer.abort_turn()
    assert optimizer.local_calls == 0 and not torch.equal(flat(model), flat(other))
    state = source.capture_state()
    optimizer.restore_state(state)
    assert optimizer.capture_state() == state


def test_replayed_updates_give_the_same_bits(network):
    """A newcomer has a snapshot of step 1 and the updates of steps 2 to 4; it does not train."""
    model, newcomer = small_model(), small_model()
    group = network()
    session = group.session()
    optimizer = wrap(session, model, GTopK(density=0.2), outer_learning_rate=0.7, outer_momentum=0.9)
    replaying = wrap(
        network().session(), newcomer, GTopK(density=0.2), outer_learning_rate=0.7, outer_momentum=0.9
    )
    run, updates = session.run, []

    def recorded(plan, buffers, skip, settings):
        outcome = run(plan, buffers, skip, settings)
        updates.append(StepUpdate(plan.step, settings, outcome.is_skipped, buffers[0].update))
        return outcome

    session.run = recorded
    for step in range(5 * EVERY):
        train_step(model, optimizer, step)
        optimizer.param_groups[0]["lr"] *= 0.9
        if step == 2 * EVERY - 1:
            replaying.restore_state(optimizer.capture_state())
            first = len(updates)
    for update in updates[first:]:
        replaying.replay_update(update)
    optimizer.param_groups[0]["lr"] /= 0.9  # the replay ends before the last change of the learning rate
    assert replica_digest(newcomer, replaying.replicated) == replica_digest(model, optimizer.replicated)


def test_a_state_with_another_velocity_is_refused(network):
    _, optimizer = trained(network)
    plain = wrap(network().session(), small_model(), GTopK(density=0.2))
    with pytest.raises(RemoteProtocolError, match="only one of the two states has an outer velocity"):
        plain.restore_state(optimizer.capture_state())
    document, tensors = optimizer.pack()
    for broken in (
        {0: {"velocity": torch.zeros(3)}},
        {0: {"velocity": torch.zeros(optimizer.flat_size, dtype=torch.float64)}},
        {1: {"velocity": torch.zeros(optimizer.flat_size)}},
        {0: {"other": torch.zeros(optimizer.flat_size)}},
        {0: {"velocity": 3}},
        {0: 3},
        [],
    ):
        state = optimizer.replicated.state_dict() | {"state": broken}
        with pytest.raises(ValueError, match="velocity"):
            optimizer.replicated.load_state_dict(state)
    with pytest.raises(RemoteProtocolError, match="moments of AdamW do not match"):
        optimizer.unpack(document | {"moments": {"dict": []}}, tensors)


# -- calls -----------------------------------------------------------------------------------------------


def test_the_wrapper_shows_the_inner_optimizer(network):
    model = small_model()
    inner = adamw(model)
    optimizer = wrap(network().session(), model, GTopK(), inner)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    train_step(model, optimizer, 0)
    assert optimizer.state_dict()["state"].keys() == inner.state_dict()["state"].keys() != set()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.local_calls == 1


def test_timings_are_of_each_local_step_and_reports_of_the_turn(network):
    session = network().session()
    model = small_model()
    optimizer = wrap(session, model, GTopK(density=0.1))
    computing_s = []
    for step in range(EVERY):
        train_step(model, optimizer, step)
        computing_s.append(optimizer.timings["computing_s"])
        names = {"computing_s", "waiting_s", "selecting_s", "communicating_s", "applying_s"}
        assert optimizer.timings.keys() == names
        assert (optimizer.timings["communicating_s"] > 0.0) == (step == EVERY - 1)
    *signs_of_life, noted = session.notes
    assert signs_of_life == [{}, {}]
    assert noted["computing_s"] == pytest.approx(sum(computing_s))


@pytest.mark.parametrize(
    "with_samples, shares", [(0, []), (1, [1.0]), (2, [0.5, 1.0]), (EVERY, [1 / 3, 2 / 3])]
)
def test_compute_figures_are_reported_before_the_turn_ends_and_without_its_stand_ins(
    network, with_samples, shares
):
    session, model = network().session(), small_model()
    optimizer = wrap(session, model, Dense())
    optimizer.begin_turn(with_samples)
    for step in range(EVERY):
        train_step(model, optimizer, step)
    assert session.computed_shares == shares


def test_adam_gives_no_warning(network, recwarn):
    wrap(network().session(), small_model(), GTopK(density=0.01))
    assert not recwarn.list


def test_an_exchange_by_hand_and_a_closure_are_refused(network):
    optimizer = wrap(network().session(), small_model(), Dense())
    with pytest.raises(ConfigError, match="which exchanges no gradient"):
        optimizer.exchange()
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_clip_norm_is_refused(network):
    model, exchange = small_model(), LocalSteps(2, Dense())
    with pytest.raises(ConfigError, match="clip each worker's"):
        LocalSGDOptimizer(adamw(model), model, exchange, network().session(), clip_norm=1.0)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"every": 0}, "every is 0"),
        ({"every": None}, "every is None"),
        ({"every": True}, "every is True"),
        ({"every": 4.0}, r"every is 4\.0"),
        ({"exchange": GTopK(momentum=0.9)}, "applies momentum to gradients"),
        ({"exchange": LocalSteps(2)}, "which LocalSteps does not support"),
        ({"exchange": "auto"}, r"'auto', which LocalSteps does not support -> .* or Auto"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate"),
        ({"outer_learning_rate": math.inf}, "outer_learning_rate"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
        ({"outer_momentum": -0.1}, "outer_momentum"),
    ],
)
def test_invalid_options_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        LocalSteps(**{"every": 4, **options})


def test_different_settings_have_different_descriptions():
    variants = [LocalSteps(4), LocalSteps(5), LocalSteps(4, Dense()), LocalSteps(4, outer_momentum=0.5)]
    variants.append(LocalSteps(4, outer_learning_rate=0.5))
    assert len({variant.describe() for variant in variants}) == 5
    assert LocalSteps(4).sparse and not LocalSteps(4, Dense()).sparse


def test_moments_are_reset_to_those_of_a_new_optimizer(network):
    """Adagrad has sums before its first step: two bad batches skip two exchanges, not all."""
    model = small_model()
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.01)
    optimizer = LocalSGDOptimizer(
        adagrad, model, LocalSteps(every=2, exchange=Dense()), network(1).session(0)
    )
    skipped = []
    for turn in range(8):
        for call in range(2):
            optimizer.zero_grad()
            backward(model, turn)
            if turn in (1, 3) and call == 0:
                model[0].weight.grad[0, 0] = math.nan
            optimizer.step()
        skipped.append(optimizer.last_skipped)
    assert skipped == [turn in (1, 3) for turn in range(8)]
