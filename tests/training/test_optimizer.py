"""The wrapped optimizer: as the inner one with one worker, equal on all in a group.

Loops of groups, with schedulers, parameter groups or compiled models, are in tests/sdk/test_loops.py.
"""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from small_classifier import backward, same, sgd, small_model, train_step
from torch import nn

from gridtrain.config import Dense, GTopK, LocalSteps, TopK
from gridtrain.errors import ConfigError
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training import optimizer as optimizer_module
from gridtrain.training.checkpoint.flat_gradient import finish_queued_work
from gridtrain.training.checkpoint.hyperparameters import hyperparameter_digest
from gridtrain.training.checkpoint.serialization import replica_digest
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.optimizer import GridOptimizer

EXCHANGES = [
    Dense(),
    Dense(topology="star"),
    TopK(density=0.1, momentum=0.5),
    GTopK(density=0.1, momentum=0.5),
    GTopK(density=0.1, momentum=0.5, values="int8", topology="direct"),
    GTopK(density=0.1, momentum=0.5, values="int8", topology="tree"),
    GTopK(density=0.1, momentum=0.5, values="bf16", topology="star"),
    GTopK(density=0.1, momentum=0.5, values="int4"),
    TopK(density=0.1, momentum=0.5, values="int2", chunk=20),
]
NAMES = ["dense ring", "dense star", "topk", "gtopk butterfly", "gtopk direct int8"]
NAMES += ["gtopk tree int8", "gtopk star bf16", "gtopk int4", "topk int2 in chunks"]


def alone_and_plain(network, make_optimizer, model=None, exchange=None, **options):
    """The same model twice: with the wrapper in a group of one, and with the plain optimizer."""
    model = model or small_model()
    twin = copy.deepcopy(model)
    session = network().session()
    wrapped = GridOptimizer(make_optimizer(model), model, exchange or Dense(), session, **options)
    return model, wrapped, twin, make_optimizer(twin), session


EITHER = pytest.mark.parametrize("exchange", [Dense(), LocalSteps(2, Dense())], ids=["whole", "local steps"])


# -- one worker: bit for bit the inner optimizer ----------------------------------------------------


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        lambda m: torch.optim.SGD(
            [{"params": m[0].parameters(), "lr": 0.3}, {"params": m[2].parameters()}], lr=0.1
        ),
    ],
    ids=["sgd", "nesterov", "adamw", "groups"],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_single_dense_worker_trains_as_the_plain_optimizer(network, make_optimizer, set_to_none):
    model, wrapped, twin, plain, _ = alone_and_plain(network, make_optimizer)
    for step in range(10):
        for one, optimizer in ((model, wrapped), (twin, plain)):
            backward(one, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    assert same(model, twin)
    assert replica_digest(model, wrapped.inner) == replica_digest(twin, plain)


def test_a_single_worker_with_full_density_trains_as_the_plain_optimizer(network):
    exchange = GTopK(density=1.0, values="fp32")
    model, wrapped, twin, plain, _ = alone_and_plain(network, sgd, exchange=exchange)
    for step in range(5):
        train_step(model, wrapped, step)
        train_step(twin, plain, step)
    assert same(model, twin)


def test_the_exchanged_gradient_can_be_clipped(network):
    model, wrapped, twin, plain, session = alone_and_plain(network, sgd)
    for step in range(4):
        backward(model, step)
        assert wrapped.exchange()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        wrapped.step()
        wrapped.zero_grad()
        backward(twin, step)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
    assert same(model, twin)
    assert len(session.plans) == 4


def test_exchange_twice_is_refused(network):
    model, wrapped, *_ = alone_and_plain(network, sgd)
    backward(model, 0)
    wrapped.exchange()
    with pytest.raises(ConfigError, match=r"^exchange\(\) was called twice for one step -> call optimizer"):
        wrapped.exchange()


def test_clip_norm_clips_the_update(network):
    model, wrapped, *_ = alone_and_plain(network, lambda m: sgd(m, lr=1.0), clip_norm=0.01)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    backward(model, 0)
    wrapped.step()
    moved = nn.utils.parameters_to_vector(model.parameters()) - before
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_state_groups_and_defaults_are_the_inner_ones(network):
    _, wrapped, *_ = alone_and_plain(network, sgd)
    assert wrapped.param_groups is wrapped.inner.param_groups
    assert wrapped.state is wrapped.inner.state and wrapped.defaults is wrapped.inner.defaults


def test_step_hooks_run(network):
    model, wrapped, *_ = alone_and_plain(network, sgd)
    seen = []
    wrapped.register_step_pre_hook(lambda *_: seen.append("before"))
    wrapped.register_step_post_hook(lambda *_: seen.append("after"))
    train_step(model, wrapped, 0)
    assert seen == ["before", "after"]


def test_a_parameter_without_gradient_takes_part_with_zeros(network):
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session())
    idle = model["idle"].weight.detach().clone()
    model["used"](torch.ones(1, 2)).sum().backward()
    wrapped.step()
    assert torch.equal(model["idle"].weight, idle)
    assert torch.equal(model["idle"].weight.grad, torch.zeros(2, 2))


@pytest.mark.parametrize(
    "exchange",
    [Dense(), GTopK(density=1.0, values="fp32"), LocalSteps(2, Dense())],
    ids=["dense", "sparse", "local"],
)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_may_share_their_memory(network, exchange, accumulated):
    """`torch.autograd.grad` returns one tensor for the first two parameters, expanded ones for the next two,
    and for the others one tensor and its two parts.  With two passes, they are scaled between the passes."""

    def gradients(model):
        first, second, third, single, whole, head, tail = model
        loss = (first + second).square().sum() + third.sum() + single.sum()
        loss = loss + (whole + torch.cat([head, tail])).square().sum()
        for parameter, gradient in zip(model, torch.autograd.grad(loss, [*model]), strict=True):
            parameter.grad = gradient
        assert first.grad is second.grad and third.grad.stride() == single.grad.stride() == (0,)
        assert whole.grad.data_ptr() < tail.grad.data_ptr() < whole.grad.data_ptr() + whole.grad.nbytes

    values = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([3.0, -1.0]),
        torch.tensor([0.5, 1.5]),
        torch.tensor([2.0]),
        torch.tensor([1.0, -2.0, 3.0, -4.0]),
        torch.tensor([0.5]),
        torch.tensor([2.5, -1.5, 1.0]),
    ]
    models = [nn.ParameterList([nn.Parameter(value.clone()) for value in values]) for _ in range(2)]
    kind = LocalSGDOptimizer if isinstance(exchange, LocalSteps) else GridOptimizer
    wrapped, plain = sgd(models[0], momentum=0.9), sgd(models[1], momentum=0.9)
    wrapped = kind(wrapped, models[0], exchange, network().session())
    for _ in range(4):
        gradients(models[0])
        if accumulated > 1:
            wrapped._flat.rescale(0.5)
            wrapped._flat.rescale(2.0)
        wrapped.step()
        gradients(models[1])
        plain.step()
    assert all(torch.allclose(a, b) for a, b in zip(*models, strict=True))
    assert len(replica_digest(models[1], plain)) == len(replica_digest(models[0], wrapped.inner)) == 32


def test_half_precision_parameters_keep_their_dtype(network):
    model, wrapped, twin, plain, _ = alone_and_plain(network, sgd, model=small_model(torch.bfloat16))
    for one, optimizer in ((model, wrapped), (twin, plain)):
        backward(one, 0)
        optimizer.step()
    assert next(model.parameters()).grad.dtype == torch.bfloat16
    assert same(model, twin)


# -- in a group -----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=NAMES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_all_workers_have_the_same_bits(network, exchange, world_size):
    def worker(session):
        model = small_model()
        optimizer = GridOptimizer(sgd(model, weight_decay=0.01), model, exchange, session, clip_norm=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        for step in range(12):
            train_step(model, optimizer, 100 * step + session.rank)
            scheduler.step()
        return replica_digest(model, optimizer)

    group = network(samples=range(1, world_size + 1), aborts={(3, 0), (7, 0), (7, 1)})
    assert len(set(group.train(worker))) == 1
    assert group.step == 12


@pytest.mark.parametrize(
    "exchange", [*EXCHANGES, LocalSteps(1, GTopK(density=0.1))], ids=[*NAMES, "local steps"]
)
def test_a_placeholder_batch_does_not_count(network, exchange):
    """A worker without samples may run its loop on any batch: its weight is 0, even if the batch is bad."""

    def worker(session):
        model = small_model()
        optimizer = wrapped(session, model, exchange)
        backward(model, session.rank)
        if session.rank == 1:
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
        return optimizer.skipped_steps, replica_digest(model, optimizer.replicated)

    with_stand_in = network(samples=[4, 0]).train(worker)
    if (
        isinstance(exchange, GTopK) and exchange.topology == "direct"
    ):  # what the owners leave out depends on their number
        assert with_stand_in[0] == with_stand_in[1] and with_stand_in[0][0] == 0
        return
    alone = network(samples=[4]).train(worker)
    assert with_stand_in == alone * 2


def wrapped(session, model, exchange):
    """With plain SGD."""
    kind = LocalSGDOptimizer if isinstance(exchange, LocalSteps) else GridOptimizer
    return kind(sgd(model), model, exchange, session)


# -- guarantee 2 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES[2:], ids=NAMES[2:])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_no_gradient_is_lost(network, exchange, world_size):
    """sum of residuals after + update == sum of residuals before + sum of the new u, aborts included."""
    samples = list(range(1, world_size + 1))
    n = small_model()[0].weight.numel()

    def worker(session):
        rng = torch.Generator().manual_seed(session.rank)
        parameter = nn.Parameter(torch.zeros(n))
        model = nn.ParameterList([parameter])
        optimizer = GridOptimizer(torch.optim.SGD([parameter], lr=1.0), model, exchange, session)
        u, history = torch.zeros(n), []
        for _ in range(8):
            gradient = torch.randn(n, generator=rng) * torch.exp2(torch.randint(-8, 8, (n,), generator=rng))
            before = optimizer.residual.state()
            u = before["u"] * exchange.momentum + gradient * (samples[session.rank] / sum(samples))
            parameter.grad = gradient
            optimizer.step()
            history.append(
                (before["residual"], u, parameter.grad.clone(), optimizer.residual.state()["residual"])
            )
        return history

    for step, of_ranks in enumerate(
        zip(*network(samples=samples, aborts={(2, 0)}).train(worker), strict=True)
    ):
        before, added, updates, after = (
            torch.stack(column).double() for column in zip(*of_ranks, strict=True)
        )
        error = (after.sum(0) + updates[0]) - (before.sum(0) + added.sum(0))
        bound = (math.log2(world_size) + 3) * 2.0**-23 * (before.abs().sum(0) + added.abs().sum(0))
        assert (error.abs() <= bound).all(), f"{world_size=} {step=}"


def test_the_part_that_a_decay_drops_is_counted_and_reported(network):
    """A quarter of the residual is dropped at each commit, and not in a round that is aborted or skipped."""

    def worker(session):
        parameter = nn.Parameter(torch.zeros(4))
        exchange = TopK(density=0.25, values="fp32", residual_decay=0.25)
        inner = torch.optim.SGD([parameter], lr=1.0)
        optimizer = GridOptimizer(inner, nn.ParameterList([parameter]), exchange, session)
        residuals = []
        for gradient in ([8.0, 4, -2, 0], [0.0, 0, 0, 16], [math.nan, 0, 0, 0]):
            parameter.grad = torch.tensor(gradient)
            optimizer.step()
            residuals.append(optimizer.residual.state()["residual"].tolist())
        return residuals, session.totals["decayed_mass"]

    ((residuals, dropped),) = network(samples=[1], aborts={(1, 0)}).train(worker)
    assert residuals == [[0, 3, -1.5, 0], [0, 2.25, -1.125, 0], [0, 2.25, -1.125, 0]]
    assert dropped == (4 + 2) / 4 + (3 + 1.5) / 4


def test_an_abort_keeps_the_residual_and_retries_the_same_gradient(network):
    def worker(session):
        model = small_model()
        optimizer = GridOptimizer(sgd(model), model, GTopK(density=0.1, momentum=0.9), session)
        begin, seen = session.begin, []

        def begin_and_look():
            seen.append((optimizer.residual.state(), [p.grad.clone() for p in model.parameters()]))
            return begin()

        session.begin = begin_and_look
        for step in range(3):
            train_step(model, optimizer, 10 * step + session.rank)
        return seen, session.plans, replica_digest(model, optimizer)

    smooth = network(2).train(worker)
    rough = network(2, aborts={(1, 0), (1, 1)}).train(worker)
    for (seen, plans, after), (_, _, smooth_after) in zip(rough, smooth, strict=True):
        assert [(p.step, p.attempt) for p in plans] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
        for retry in (2, 3):
            assert all(torch.equal(seen[1][0][name], seen[retry][0][name]) for name in ("residual", "u"))
            assert all(torch.equal(a, b) for a, b in zip(seen[1][1], seen[retry][1], strict=True))
        assert after == smooth_after


def test_a_retry_reweights_to_the_new_membership(network):
    """The other worker's samples are removed between two attempts: the same gradient has weight 1 then."""
    group = network(1, samples=[2], aborts={(0, 0)})
    model = nn.Linear(1, 1, bias=False)
    optimizer = GridOptimizer(sgd(model, lr=1.0), model, Dense(), session := group.session())
    begin = session.begin

    def begin_with_eight_samples():
        plan = begin()
        return StepPlan(0, 0, 0, 1, 2, 8) if plan.attempt == 0 else plan

    session.begin = begin_with_eight_samples
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert model.weight.grad.item() == 1.0


# -- a gradient that is not finite -------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_one_bad_gradient_skips_the_step_on_all(network, exchange, bad):
    def worker(session):
        model = small_model()
        optimizer = GridOptimizer(sgd(model, weight_decay=0.1), model, exchange, session)
        train_step(model, optimizer, session.rank)
        before, residual = replica_digest(model, optimizer), optimizer.residual.state()
        backward(model, session.rank)
        if session.rank == 1:
            model[2].bias.grad[1] = bad
        optimizer.step()
        assert optimizer.last_skipped and optimizer.skipped_steps == 1
        assert replica_digest(model, optimizer) == before
        assert all(torch.equal(t, residual[name]) for name, t in optimizer.residual.state().items())
        optimizer.zero_grad()
        train_step(model, optimizer, session.rank)
        assert not optimizer.last_skipped and optimizer.skipped_steps == 1
        return replica_digest(model, optimizer)

    assert len(set(network(3).train(worker))) == 1


# -- hyper-parameters -----------------------------------------------------------------------------


def test_the_settings_digest_depends_on_every_plain_field():
    def of(**options):
        return hyperparameter_digest(sgd(small_model(), **options))

    assert of() == of()
    assert len({of(), of(lr=0.2), of(weight_decay=0.1), of(momentum=0.9), of(lr=torch.tensor(0.3))}) == 5


def wrap(make_optimizer, model=None, exchange=None, **options):
    model = model or small_model()
    session = SimpleNamespace(increase_figure=None)
    return GridOptimizer(make_optimizer(model), model, exchange or Dense(), session, **options)


# -- refused uses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: wrap(lambda m: torch.optim.LBFGS(m.parameters())),
            "^LBFGS cannot be used in a run: it evaluates a batch several times in one step, .* -> use SGD",
        ),
        (
            lambda: wrap(lambda m: torch.optim.SparseAdam(m.parameters())),
            "^SparseAdam needs sparse gradients, but .* -> build the embedding with sparse=False",
        ),
        (lambda: wrap(lambda m: wrap(sgd, m), None), "already wrapped"),
        (
            lambda: wrap(lambda m: sgd(small_model())),
            "^the optimizer has 4 parameters that the model does not have -> build the",
        ),
        (
            lambda: wrap(lambda m: sgd(m[0])),
            r"groups lack 2 trainable parameters.* '2\.weight'",
        ),
        (
            lambda: wrap(sgd, nn.Embedding(4, 2, sparse=True)),
            "^parameter 'weight' has sparse gradients, but only dense gradients can be exchanged -> ",
        ),
        (lambda: wrap(sgd, nn.Embedding(4, 2, max_norm=1.0)), "embedding of 'weight' has max_norm"),
        (lambda: wrap(sgd, nn.Linear(2, 2).requires_grad_(False)), "no trainable parameter"),
        (lambda: wrap(sgd, nn.LazyLinear(2)), "of a lazy module has no shape yet"),
        (lambda: wrap(sgd, nn.Linear(2, 2, dtype=torch.complex64)), r"torch\.complex64"),
        (lambda: wrap(sgd, clip_norm=0.0), r"clip_norm is 0\.0"),
        (
            lambda: wrap(lambda m: sgd(m, momentum=0.9), exchange=GTopK(momentum=0.9)),
            r"SGD has momentum 0\.9, and GTopK.* -> "
            r"keep the exchange's momentum and build SGD with momentum=0",
        ),
    ],
)
def test_unsupported_optimizers_and_models_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_closures_and_late_groups_are_refused():
    wrapped = wrap(sgd)
    with pytest.raises(
        ConfigError, match=r"^step\(\) was called with a closure; a gradient is exchanged once and cannot be"
    ):
        wrapped.step(lambda: 0.0)
    with pytest.raises(ConfigError, match=r"^a parameter group was added after grid\.optimizer had fixed"):
        wrapped.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied):
    """A copy would lack the exchange; torch.save would write a file that cannot be loaded."""
    with pytest.raises(ConfigError, match=r"cannot be copied or pickled -> .*optimizer\.state_dict\(\)"):
        copied(wrap(sgd))


@EITHER
def test_a_parameter_that_is_unfrozen_later_is_refused(network, exchange):
    model = small_model()
    model[0].bias.requires_grad_(False)
    optimizer = wrapped(network().session(), model, exchange)
    model[0].bias.requires_grad_(True)
    backward(model, 0)
    with pytest.raises(ConfigError, match="frozen when the optimizer was wrapped"):
        optimizer.step()


@EITHER
@pytest.mark.parametrize("taken", [0, 2, 40])
def test_a_parameter_that_is_replaced_later_is_refused(network, exchange, taken):
    """Otherwise the run ends without having trained it; it is checked in steps 1, 2, 4, 8, 16, 32, 48, ..."""
    model = small_model()
    optimizer = wrapped(network().session(), model, exchange)
    for step in range(taken):
        train_step(model, optimizer, step)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    backward(model, 0)
    with pytest.raises(ConfigError, match=r"'0\.weight' was added or replaced"):
        for _ in range(1 + taken // 2):
            optimizer.step()


def test_a_parameter_that_is_frozen_later_is_refused(network):
    """Its gradient would be 0, and weight decay and momentum would change it."""
    model = small_model()
    wrapped = GridOptimizer(sgd(model, momentum=0.9), model, Dense(), network().session())
    backward(model, 0)
    wrapped.step()
    model[0].bias.requires_grad_(False)
    wrapped.zero_grad()
    backward(model, 1)
    with pytest.raises(ConfigError, match=r"'0\.bias' was frozen after .* lr to 0 later"):
        wrapped.step()


@EITHER
def test_a_group_added_later_to_the_inner_optimizer_is_refused(network, exchange):
    """Each worker would train it on its own samples only, which no vote would detect."""
    model = small_model()
    optimizer = wrapped(network().session(), model, exchange)
    backward(model, 0)
    optimizer.inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="was given further parameters"):
        optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_adam_after_a_sparse_exchange_warns_with_the_remedy(optimizer, recwarn):
    wrap(lambda m: optimizer(m.parameters()))
    assert not recwarn.list
    with pytest.warns(
        UserWarning, match=r"Dense\(\), SGD with GTopK\(momentum=0\.9\), or LocalSteps\(every=32"
    ):
        wrap(lambda m: optimizer(m.parameters()), exchange=GTopK())


# -- reports to the runtime -----------------------------------------------------------------------


def test_the_seconds_of_each_step_are_recorded(network):
    model, wrapped, _, _, session = alone_and_plain(network, sgd)
    train_step(model, wrapped, 0)
    train_step(model, wrapped, 1)
    names = {"computing_s", "waiting_s", "selecting_s", "communicating_s", "applying_s"}
    assert [note.keys() for note in session.notes] == [names, names]
    assert session.notes[-1] == wrapped.timings
    assert all(seconds >= 0.0 for note in session.notes for seconds in note.values())


def test_residuals_are_saved_separately(network):
    model, wrapped, *_ = alone_and_plain(network, sgd, exchange=GTopK(density=0.1, momentum=0.9))
    train_step(model, wrapped, 0)
    twin = copy.deepcopy(model)
    other = GridOptimizer(sgd(twin), twin, GTopK(density=0.1, momentum=0.9), network().session())
    other.residual.load(wrapped.residual.state())
    train_step(model, wrapped, 1)
    train_step(twin, other, 1)
    assert same(model, twin)
    assert wrap(sgd).residual.state() == {}


# -- times ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [Dense(), GTopK(density=0.5)])
def test_queued_work_of_a_gpu_counts_as_computing(network, monkeypatch, exchange):
    """A GPU only queues backward; otherwise the coordinator would consider it many times as fast."""
    clock_s = [0.0]

    def finish(device):
        clock_s[0] += 2.0

    monkeypatch.setattr(optimizer_module, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    monkeypatch.setattr(optimizer_module, "finish_queued_work", finish)
    model = small_model()
    optimizer = GridOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, exchange, network().session())
    backward(model, 1)
    optimizer.step()
    assert optimizer.timings["computing_s"] == 2.0 and sum(optimizer.timings.values()) == 2.0


def test_an_aborted_attempt_counts_as_waiting(network, monkeypatch):
    """It ends with a timeout if a member has stalled, so it would make links look slow."""
    clock_s = [0.0]

    def run(*args):
        clock_s[0] += 2.0 if session.network.attempt else 30.0
        return exchange(*args)

    session = network(1, aborts={(0, 0)}).session()
    exchange = session.run
    monkeypatch.setattr(session, "run", run)
    monkeypatch.setattr(optimizer_module, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    model = small_model()
    optimizer = GridOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, Dense(), session)
    backward(model, 1)
    optimizer.step()
    assert (optimizer.timings["waiting_s"], optimizer.timings["communicating_s"]) == (30.0, 2.0)


def test_only_a_gpu_is_synchronised_on_the_stream_of_the_thread(monkeypatch):
    finished = []

    def current_stream(device):
        return SimpleNamespace(synchronize=lambda: finished.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    finish_queued_work(torch.device("cpu"))
    assert finished == []
    finish_queued_work(torch.device("cuda", 1))
    assert finished == [torch.device("cuda", 1)]
