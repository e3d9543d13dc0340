"""Several optimizers of one model: wrapped as one, they train as the same optimizers do in plain torch."""

import copy
from functools import partial

import pytest
import torch
from small_classifier import backward, same, small_model
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from gridtrain.config import Auto, Dense, GTopK, LocalSteps
from gridtrain.errors import ConfigError
from gridtrain.sdk.grid import _fit_auto
from gridtrain.sdk.run_facts import describe_optimizer
from gridtrain.training.checkpoint.hyperparameters import hyperparameter_digest
from gridtrain.training.checkpoint.joint_optimizer import JointOptimizer, as_one
from gridtrain.training.checkpoint.serialization import capture_state, restore_state
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.optimizer import GridOptimizer

OUTER = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}


def pair(model, **options):
    """SGD for the matrices, AdamW in two groups for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    first, second = [p for p in model.parameters() if p.ndim == 1]
    rest = [{"params": [first]}, {"params": [second], "lr": 0.02}]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01, **options)]


def trained(steps=3):
    model = small_model()
    joint = as_one(pair(model))
    for step in range(steps):
        backward(model, step)
        joint.step()
        joint.zero_grad()
    return model, joint


@pytest.mark.parametrize("scheduled", ["none", "inner", "wrapped"])
@pytest.mark.parametrize("local", [False, True], ids=["whole", "local steps"])
def test_a_single_worker_trains_as_the_plain_optimizers(network, scheduled, local):
    model, twin = small_model(), small_model()
    own, plain = pair(model), pair(twin)
    kind, exchange = (
        (LocalSGDOptimizer, LocalSteps(2, Dense(), **OUTER)) if local else (GridOptimizer, Dense())
    )
    wrapped = kind(as_one(own), model, exchange, network().session())
    scheduler = torch.optim.lr_scheduler.ExponentialLR
    targets = {"none": [], "inner": [*own, *plain], "wrapped": [wrapped, *plain]}[scheduled]
    schedulers = [scheduler(each, 0.9) for each in targets]
    for step in range(6):
        backward(model, step)
        wrapped.step()
        wrapped.zero_grad()
        backward(twin, step)
        for each in plain:
            each.step()
            each.zero_grad()
        for each in schedulers:
            each.step()
    if local:  # anchor - (anchor - local) is rounded
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    else:
        assert same(model, twin)
        assert wrapped.state_dict()["state"].keys() == {0, 1, 2, 3}
    rates = [group["lr"] for group in wrapped.param_groups]
    assert rates == [group["lr"] for each in plain for group in each.param_groups]


def test_the_state_is_numbered_as_that_of_one_optimizer():
    model, joint = trained()
    state = joint.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2], [3]]
    moments = [["momentum_buffer"]] * 2 + [["exp_avg", "exp_avg_sq", "step"]] * 2
    assert {number: sorted(values) for number, values in state["state"].items()} == dict(enumerate(moments))
    other = small_model()
    loaded = as_one(pair(other))
    loaded.load_state_dict(copy.deepcopy(state))
    other.load_state_dict(model.state_dict())
    for one, optimizer in ((model, joint), (other, loaded)):
        backward(one, 9)
        optimizer.step()
    assert same(model, other)


def test_a_newcomer_continues_with_the_received_state():
    model, joint = trained()
    other = small_model()
    newcomer = as_one(pair(other))
    joint.param_groups[1]["lr"] = 0.5
    restore_state(capture_state(model, joint, {}), other, newcomer, {})
    assert newcomer.param_groups[1]["lr"] == 0.5
    for one, optimizer in ((model, joint), (other, newcomer)):
        backward(one, 9)
        optimizer.step()
    assert same(model, other)


def test_a_state_with_another_number_of_groups_is_refused():
    _, joint = trained()
    state = joint.state_dict()
    state["param_groups"].append(state["param_groups"][0])
    with pytest.raises(ValueError, match="the state has 4 groups, the optimizers 3"):
        joint.load_state_dict(state)


def test_optimizers_of_other_classes_or_in_another_order_have_other_settings():
    model = small_model()
    muonlike, adamw = pair(model)
    either = [as_one([muonlike, adamw]), as_one([adamw, muonlike])]
    assert hyperparameter_digest(either[0]) != hyperparameter_digest(either[1])
    assert describe_optimizer(either[0]).startswith("SGD(lr=0.1, momentum=0.9) + AdamW(")
    assert as_one([muonlike]) is muonlike


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (lambda m: [], "the list of optimizers is empty -> list at least one"),
        (lambda m: [*pair(m), m], "a list of optimizers contains a Sequential -> list objects of torch"),
        (
            lambda m: [*pair(m), torch.optim.SGD([m[0].weight], lr=0.1)],
            "SGD and SGD have 1 parameter in common -> give each parameter to one optimizer",
        ),
    ],
    ids=["empty", "no optimizer", "common parameter"],
)
def test_a_list_that_is_no_optimizer_is_refused(listed, expected):
    with pytest.raises(ConfigError, match=expected):
        as_one(listed(small_model()))


def test_a_scheduler_of_momentum_says_what_not_all_of_the_optimizers_have():
    joint = as_one(pair(small_model()))
    assert "lr" in joint.defaults and not {"momentum", "betas"} & joint.defaults.keys()
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(joint, max_lr=1.0, total_steps=4)
    for kind in (partial(OneCycleLR, total_steps=4), partial(CyclicLR, base_lr=0.1)):
        scheduler = kind(joint, max_lr=1.0, cycle_momentum=False)
        joint.step()
        scheduler.step()
        assert joint.param_groups[0]["lr"] == joint.param_groups[2]["lr"] == scheduler.get_last_lr()[0]


def test_with_several_optimizers_of_which_one_is_adam_auto_stays_dense():
    wished = Auto(density=0.01)
    assert not _fit_auto(wished, as_one(pair(small_model())), None).sparse
    assert _fit_auto(wished, pair(small_model())[0], None) is wished


def test_no_change_of_the_whole_is_lost():
    model, joint = trained()
    assert joint.state[model[0].weight].keys() == {"momentum_buffer"}
    with pytest.raises(AttributeError):
        joint.state.clear()
    with pytest.raises(TypeError):
        joint.state[model[0].weight] = {}
    with pytest.raises(ConfigError, match="parameter group was added to a list of optimizers -> add it"):
        joint.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_a_copy_of_model_and_optimizers_trains_on():
    both = trained()
    copied = copy.deepcopy(both)
    for model, optimizer in (both, copied):
        backward(model, 9)
        optimizer.step()
    assert same(both[0], copied[0])


class Counting(torch.optim.SGD):
    """It counts its steps beside the state of the parameters, or in an entry of its own."""

    own_entry = False

    def step(self, closure=None):
        super().step(closure)
        if not self.own_entry:
            self.state["steps"] = 1

    def state_dict(self):
        return super().state_dict() | ({"steps": 1} if self.own_entry else {})


@pytest.mark.parametrize("own_entry", [False, True])
def test_a_state_that_is_not_one_of_parameters_is_refused(own_entry, monkeypatch):
    monkeypatch.setattr(Counting, "own_entry", own_entry)
    model = small_model()
    with pytest.raises(ConfigError, match=r"Counting's state contains 'steps', .* -> use Counting alone"):
        joint = as_one([torch.optim.SGD(model[0].parameters()), Counting(model[2].parameters())])
        joint.step()
        joint.state_dict()


def test_each_of_the_optimizers_must_be_usable(network):
    model = small_model()

    def wrap(optimizers, exchange=Dense()):  # noqa: B008  it is immutable
        return GridOptimizer(JointOptimizer(optimizers), model, exchange, network().session())

    with pytest.raises(ConfigError, match="LBFGS cannot be used in a run"):
        wrap([torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.LBFGS(model[2].parameters())])
    with pytest.raises(ConfigError, match="lack 2 trainable parameters of the model"):
        wrap([torch.optim.SGD(model[0].parameters(), lr=0.1)])
    with pytest.raises(ConfigError, match="keep the exchange's momentum and build SGD with momentum=0"):
        wrap(pair(model), GTopK(density=0.5, momentum=0.9))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("as_list", [False, True])
def test_adam_has_the_same_settings_with_older_torch(kind, as_list):
    recent, older = (kind(torch.nn.Linear(2, 1).parameters(), lr=0.01) for _ in range(2))
    for fields in (older.defaults, *older.param_groups):
        fields.pop("decoupled_weight_decay", None)  # which torch before 2.7 does not have
    recent, older = (as_one([each] if as_list else each) for each in (recent, older))
    assert describe_optimizer(recent) == describe_optimizer(older)
    assert hyperparameter_digest(recent) == hyperparameter_digest(older)
    older.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert older.param_groups[1]["decoupled_weight_decay"] == (kind is torch.optim.AdamW)
