"""`unused="skip"`: a parameter that no worker uses in a step is skipped, as by torch in one process."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small_classifier import same
from torch import nn

from gridtrain.adapters.site import Site
from gridtrain.config import Auto, Dense, GTopK, LocalSteps, Overlap
from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint import pretrained
from gridtrain.training.checkpoint.flat_gradient import FlatGradient
from gridtrain.training.checkpoint.pretrained import PretrainedLayout
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.optimizer import GridOptimizer

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(6, 2, 4, 3, generator=GENERATOR)  # steps, workers, samples, features
DENSE = [Dense(), Dense(topology="star"), Dense(topology="direct")]
ON_ALL_WORKERS = {0: "ab", 1: "a", 2: "b", 3: "", 4: "ab", 5: "a"}  # by step


class Branches(nn.Module):
    """Linear layers a and b; the gradient of their biases is zero, which is not None."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.fill_(0.1 * (number + 1))

    def loss(self, inputs, branches):
        outputs = [
            layer.weight.sum() + 0.0 * layer.bias.sum() for layer in (getattr(self, b) for b in branches)
        ]
        chosen = [(getattr(self, b)(inputs) - getattr(self, b).bias).square().mean() for b in branches]
        return sum(chosen) + sum(0.0 * output for output in outputs)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def is_close(one, other):
    """Equal up to the order of the sums over samples."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(p, q, atol=1e-6) for p, q in pairs)


def plain(make, branches_of, clip_norm=None):
    """One process with the samples of both workers; `branches_of(step)`: by worker."""
    model = Branches()
    optimizer = make(model)
    for step, inputs in enumerate(INPUTS):
        for worker, branches in enumerate(branches_of(step)):
            if branches:
                (model.loss(inputs[worker], branches) / 2).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


def group(network, make, branches_of, aborts=(), **options):
    def work(session):
        model = Branches()
        wrapped = GridOptimizer(make(model), model, session=session, unused="skip", **options)
        skipped = []
        for step, inputs in enumerate(INPUTS):
            if branches := branches_of(step)[session.rank]:
                model.loss(inputs[session.rank], branches).backward()
            wrapped.step()
            skipped.append("".join(name for name in "ab" if getattr(model, name).weight.grad is None))
            wrapped.zero_grad()
        return model, skipped

    (one, skipped), (other, others) = network(2, aborts=aborts).train(work)
    assert same(one, other) and skipped == others
    return one, skipped


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("exchange", DENSE, ids=lambda e: e.describe())
def test_a_branch_that_no_worker_takes_is_skipped(network, make, exchange):
    def branches_of(step):
        return [ON_ALL_WORKERS[step]] * 2

    model, skipped = group(network, make, branches_of, exchange=exchange, aborts={(1, 0), (2, 0)})
    assert skipped == ["", "b", "a", "ab", "", "b"]
    expected = plain(make, branches_of)
    assert is_close(model, expected)


def test_a_branch_that_one_worker_takes_is_updated_on_all(network):
    def branches_of(step):
        return [("a", "b"), ("b", "b"), ("a", "a"), ("", "a"), ("ab", ""), ("a", "b")][step]

    model, skipped = group(network, sgd, branches_of, exchange=Dense())
    assert skipped == ["", "a", "b", "b", "", ""]
    expected = plain(sgd, branches_of)
    assert is_close(model, expected)


def test_the_norm_is_that_of_the_gradient(network):
    def branches_of(step):
        return ["ab", "b"]

    model, _ = group(network, sgd, branches_of, exchange=Dense(), clip_norm=0.05)
    expected = plain(sgd, branches_of, clip_norm=0.05)
    assert is_close(model, expected)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_branch_that_is_frozen_in_some_steps_is_skipped(network, make):
    """A GAN freezes its discriminator while the generator learns from it."""

    def train(make_step, session=None):
        model = Branches()
        optimizer = make_step(make(model), model)
        for step, inputs in enumerate(INPUTS):
            model.b.requires_grad_(step % 2 == 0)
            samples = inputs if session is None else inputs[session.rank : session.rank + 1]
            (sum(model.loss(each, "ab") for each in samples) / len(samples)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def work(session):
        return train(partial(GridOptimizer, exchange=Dense(), session=session, unused="skip"), session)

    one, other = network(2).train(work)
    expected = train(lambda inner, model: inner)
    assert same(one, other) and is_close(one, expected)


def test_a_frozen_parameter_that_still_has_a_gradient_is_refused(network):
    """torch would apply the gradient of an earlier step again."""
    model = Branches()
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session(), unused="skip")
    model.loss(INPUTS[0, 0], "ab").backward()
    wrapped.step()
    model.b.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'b\.weight' was frozen .* still has a gradient .* grad to None"):
        wrapped.step()


def test_an_export_must_contain_a_branch_that_is_frozen_at_the_moment(network):
    model = Branches()
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session(), unused="skip")
    model.b.requires_grad_(False)
    covers_a = PretrainedLayout({}, {"model.safetensors": {"weight": "a.weight", "bias": "a.bias"}})
    assert pretrained._uncovered(model, covers_a, wrapped.trained) == ["b.weight", "b.bias"]


def test_a_parameter_is_weighted_even_if_it_was_frozen_when_the_weight_was_set():
    model = Branches()
    flat = FlatGradient(model, sgd(model), has_used=True)
    model.b.requires_grad_(False)
    flat.scale_backward(0.5)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    model.b.requires_grad_(True)
    sum(p.sum() for p in model.parameters()).backward()
    assert all((p.grad == 0.5).all() for p in model.parameters())


def test_a_gradient_of_zero_is_used(network):
    model = Branches()
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session(), unused="skip")
    before = model.a.bias.detach().clone()
    model.loss(INPUTS[0, 0], "a").backward()
    assert not model.a.bias.grad
    wrapped.step()
    assert not torch.equal(model.a.bias, before), "weight decay"
    assert model.a.bias.grad is not None and model.b.bias.grad is None


def test_a_missed_step_is_replayed_with_what_it_skipped(network):
    model, other = Branches(), Branches()
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session(), unused="skip")
    absent = GridOptimizer(sgd(other), other, Dense(), network().session(), unused="skip")
    load, updates = wrapped._load_update, []
    wrapped._load_update = lambda update: (updates.append(update.copy()), load(update))
    for branches in ("ab", "a", "b"):
        model.loss(INPUTS[0, 0], branches).backward()
        wrapped.step()
        wrapped.zero_grad()
    for update in updates:
        absent.apply_update(update)
    assert same(model, other)


def test_the_leader_of_a_site_skips_it(network):
    def wrap(inner, model, **options):
        return GridOptimizer(inner, model, Dense(), network().session(), **options)

    model, twin = Branches(), Branches()
    alone = Site(SimpleNamespace(optimizer=wrap), SimpleNamespace(rank=0, world_size=1))
    alone._weight = 1.0
    optimizer, plain_optimizer = alone.optimizer(sgd(model), model, unused="skip"), sgd(twin)
    for branches in ("ab", "a", "b"):
        for each, steps in ((model, optimizer), (twin, plain_optimizer)):
            each.loss(INPUTS[0, 0], branches).backward()
            steps.step()
            steps.zero_grad()
    assert same(model, twin)


@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        (Dense(values="bf16"), {}),
        (Dense(values="int8"), {}),
        (GTopK(density=0.5), {}),
        (Auto(), {}),
        (LocalSteps(2, Dense()), {}),
        (Dense(), {"overlap": Overlap()}),
    ],
    ids=["bf16", "int8", "gtopk", "auto", "local steps", "overlap"],
)
def test_an_exchange_that_is_not_exact_is_refused(network, exchange, options):
    model = Branches()
    kind = LocalSGDOptimizer if isinstance(exchange, LocalSteps) else GridOptimizer
    with pytest.raises(ConfigError, match=r'unused="skip" was set with .*; it needs Dense\(\)'):
        kind(sgd(model), model, exchange, network().session(), unused="skip", **options)


def test_another_value_is_refused(network):
    model = Branches()
    with pytest.raises(ConfigError, match="unused is 'none'; it must be zero or skip"):
        GridOptimizer(sgd(model), model, Dense(), network().session(), unused="none")
