"""A newcomer receives the state bit for bit, and a state of another worker is not trusted."""

import json
import struct
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.flat_gradient import (
    canonical_names,
    canonical_parameters,
    describe_parameters,
)
from gridtrain.training.checkpoint.model_buffers import float_buffers
from gridtrain.training.checkpoint.serialization import (
    capture_state,
    replica_digest,
    restore_state,
)
from gridtrain.training.grad_scaler import GridScaler


def model_of(seed=0, width=6):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    model[2].bias.requires_grad_(False)
    return model


def train(model, optimizer, scheduler, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        F.mse_loss(model(torch.randn(8, 4, generator=generator)), torch.zeros(8, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}
SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.95**step),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
def test_a_newcomer_continues_bit_for_bit(optimizer_name, scheduler_name):
    def worker(seed):
        model = model_of(seed)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        return model, optimizer, SCHEDULERS[scheduler_name](optimizer)

    source, newcomer = worker(seed=0), worker(seed=9)
    group = source[1].param_groups[0]
    if torch.is_tensor(group["lr"]) and group["lr"] is group["initial_lr"]:
        pytest.skip("the SequentialLR of this torch (before 2.9) changes `initial_lr` together with `lr`")
    train(*source, steps=3)
    assert replica_digest(*source[:2]) != replica_digest(*newcomer[:2])
    restore_state(capture_state(*source[:2], {"lr": source[2]}), *newcomer[:2], {"lr": newcomer[2]})
    assert replica_digest(*source[:2]) == replica_digest(*newcomer[:2])
    assert all(map(torch.equal, float_buffers(source[0]), float_buffers(newcomer[0])))
    for one in (source, newcomer):
        train(*one, steps=4, seed=2)
    assert replica_digest(*source[:2]) == replica_digest(*newcomer[:2])
    assert source[2].state_dict().keys() == newcomer[2].state_dict().keys()


def test_a_loss_scale_is_received_if_both_sides_have_one():
    """Checkpoints of earlier versions have none, and neither have workers on a CPU beside those on GPUs."""
    ours = f"{serialization.INTERNAL_PREFIX}scaler"

    def worker(scale, **others):
        layer = nn.Linear(2, 1)
        scaler = GridScaler(device="cpu", init_scale=scale)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1), {ours: scaler} | others

    source, newcomer = worker(8.0), worker(1024.0)
    restore_state(capture_state(*source), *newcomer)
    assert newcomer[2][ours].get_scale() == 8.0
    older, beside = (*worker(2.0)[:2], {}), (*worker(2.0)[:2], {})
    restore_state(capture_state(*older), *newcomer)
    assert newcomer[2][ours].get_scale() == 8.0, "it keeps its own scale"
    restore_state(capture_state(*source), *beside)
    assert replica_digest(*beside[:2]) == replica_digest(*source[:2])
    with pytest.raises(
        RemoteProtocolError, match=r"the state tracks \['scaler'\], but this worker tracks \[\]"
    ):
        restore_state(capture_state(*worker(8.0, scaler=GridScaler(device="cpu"))), *newcomer)


def test_a_worker_without_a_loss_scale_has_the_same_digest():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_one = {f"{serialization.INTERNAL_PREFIX}scaler": GridScaler(device="cpu")}
    assert serialization.initial_digest(model, optimizer, with_one) == serialization.initial_digest(
        model, optimizer, {}
    )


class WideMoments(torch.optim.Optimizer):
    """Accumulates in float32, as bfloat16 would lose small changes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            if not own:
                own["sums"] = [torch.zeros_like(parameter, dtype=torch.float32)]
            own["sums"][0].add_(parameter.grad.float())
            parameter.sub_((own["sums"][0] / 3).to(parameter.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, WideMoments])
def test_an_optimizers_state_keeps_its_own_precision(kind, dtype):
    """torch itself would load it with the parameters' dtype, and a newcomer would differ for ever."""

    def worker():
        layer = nn.Linear(4, 4, bias=False).to(dtype)
        return layer, kind(layer.parameters())

    def steps(layer, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            layer.weight.grad = torch.randn(4, 4, generator=generator).to(dtype)
            optimizer.step()

    source, newcomer = worker(), worker()
    steps(*source, seed=0)
    restore_state(capture_state(*source, {}), *newcomer, {})
    assert replica_digest(*source) == replica_digest(*newcomer)
    for one in (source, newcomer):
        steps(*one, seed=1)
    assert replica_digest(*source) == replica_digest(*newcomer)


@pytest.fixture
def pair():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), steps=2)
    return model, optimizer


class Box:
    def __init__(self, **content):
        self.content = content

    def state_dict(self):
        return self.content

    def load_state_dict(self, content):
        self.content = content


def test_plain_data_keeps_its_types(pair):
    plain = {"a": [1, 2.5, None, True, "x", (1, (2,))], 7: {"inf": float("inf"), -1: 1 / 3}, "": {}}
    sent = Box(plain=plain, milestones=Counter({3: 1, 5: 2}), tensor={0: torch.arange(3)})
    box = Box()
    restore_state(capture_state(*pair, {"box": sent}), *pair, {"box": box})
    assert box.content["plain"] == plain and type(box.content["plain"]["a"][5]) is tuple
    assert list(box.content["milestones"].elements()) == [3, 5, 5]
    assert torch.equal(box.content["tensor"][0], torch.arange(3))


def test_a_captured_state_is_a_copy(pair):
    blobs = capture_state(*pair, {})
    before = replica_digest(*pair)
    with torch.no_grad():
        pair[0][0].weight.zero_()
    restore_state(b"".join(blobs), *pair, {})
    assert replica_digest(*pair) == before


def test_other_threads_run_while_a_tensor_is_copied() -> None:
    """While the switch interval is an hour, another thread runs only where the interpreter lock is released;
    it then sees which function has released the lock."""
    copying = {"_frame", "_read_tensors"}
    model = nn.Linear(1 << 12, 1 << 11, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main, stop, seen = threading.get_ident(), threading.Event(), set[str]()

    def watch() -> None:
        while not stop.wait(0.0001):
            seen.add(sys._current_frames()[main].f_code.co_name)

    watcher = threading.Thread(target=watch)
    interval_s = sys.getswitchinterval()
    deadline_s = time.monotonic() + 30.0
    sys.setswitchinterval(3600.0)
    try:
        watcher.start()
        while not copying <= seen and time.monotonic() < deadline_s:
            restore_state(capture_state(model, optimizer, {}), model, optimizer, {})
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        watcher.join()
    assert copying <= seen


def test_a_state_of_a_compiled_model_fits_a_plain_one(pair):
    compiled = torch.compile(pair[0], backend="eager")
    newcomer = model_of(5), None
    optimizer = torch.optim.SGD(newcomer[0].parameters(), lr=0.1, momentum=0.9)
    restore_state(capture_state(compiled, pair[1], {}), newcomer[0], optimizer, {})
    assert replica_digest(compiled, pair[1]) == replica_digest(newcomer[0], optimizer)
    assert described(compiled) == described(newcomer[0])


def test_a_value_that_cannot_be_sent_is_refused_with_its_path(pair):
    with pytest.raises(ConfigError, match=r"ema\.deep\[1\] is a function"):
        capture_state(*pair, {"ema": Box(deep=[1, lambda: 0])})


@pytest.mark.parametrize("pack", [capture_state, serialization.pack_state])
def test_a_dtype_that_cannot_be_sent_is_refused_with_the_tensors_name(pack):
    model = nn.Linear(1, 1)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"model\.phase is a tensor of torch\.complex128"):
        pack(model, torch.optim.SGD(model.parameters(), lr=0.1), {})


# -- untrusted states ---------------------------------------------------------------------------------


def test_another_model_is_refused_and_nothing_changes(pair):
    other = model_of(width=7)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = replica_digest(other, optimizer)
    with pytest.raises(
        RemoteProtocolError, match=r"parameters differ \(5 in all\); the first is '0\.bias'.*\(6,\).*\(7,\)"
    ):
        restore_state(capture_state(*pair, {}), other, optimizer, {})
    assert replica_digest(other, optimizer) == before


def test_other_trackers_are_refused(pair):
    with pytest.raises(RemoteProtocolError, match=r"tracks \['ema'\], but this worker tracks \[\]"):
        restore_state(capture_state(*pair, {"ema": Box()}), *pair, {})


def test_another_optimizer_is_refused(pair):
    split = [
        {"params": pair[0][0].parameters()},
        {"params": [*pair[0][1].parameters(), *pair[0][2].parameters()]},
    ]
    with pytest.raises(RemoteProtocolError, match="number of parameter groups"):
        restore_state(capture_state(*pair, {}), pair[0], torch.optim.SGD(split, lr=0.1), {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        b"\0" * 8,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x04" + b"\0" * 7 + b"null" + b"\0" * 8,
    ],
)
def test_garbage_is_refused(pair, data):
    with pytest.raises(RemoteProtocolError, match="not a training state"):
        restore_state(data, *pair, {})


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"0": None},
        {"0": {}},
        {"0": FLOATS | {"dtype": "F31"}},
        {"0": FLOATS | {"dtype": ["F32"]}},
        {"0": FLOATS | {"shape": [3]}},
        {"0": FLOATS | {"shape": [True, 2]}},
        {"0": FLOATS | {"shape": [-1, -2]}},
        {"0": FLOATS | {"shape": 2}},
        {"0": FLOATS | {"shape": [1] * 65 + [2]}},
        {"0": FLOATS | {"data_offsets": [4, 12]}},
        {"0": FLOATS | {"data_offsets": ["0", "8"]}},
        {"0": FLOATS, "1": FLOATS},
        {"0": FLOATS, "1": FLOATS | {"data_offsets": [8, 16]}},
        {"0": FLOATS | {"shape": [1], "data_offsets": [0, 4]}},
        {"0": FLOATS, "1": FLOATS | {"shape": [1 << 40, 1 << 40, 0], "data_offsets": [8, 8]}},
        {"0": FLOATS, "1": FLOATS | {"shape": [0, 1 << 70], "data_offsets": [8, 8]}},
    ],
    ids=str,
)
def test_a_damaged_table_of_tensors_is_refused(pair, table):
    def blob(table):
        text, header = b"{}", json.dumps(table).encode()
        tensors = struct.pack("<Q", len(header)) + header + bytes(8)
        return struct.pack("<2Q", len(text), len(tensors)) + text + tensors

    with pytest.raises(RemoteProtocolError, match="'buffers' is missing"):
        restore_state(blob({"0": FLOATS}), *pair, {})
    with pytest.raises(RemoteProtocolError, match="not a training state") as refused:
        restore_state(blob(table), *pair, {})
    assert "is missing" not in str(refused.value)


# -- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "canonical"),
    [
        (["a.w", "b"], ["a.w", "b"]),
        (["_orig_mod.a.w", "_orig_mod.b"], ["a.w", "b"]),
        (["module._orig_mod.a.w", "module._orig_mod.b"], ["a.w", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["layer._orig_mod.w", "b"], ["layer.w", "b"]),
        (["module.w", "head.w"], ["module.w", "head.w"]),  # the model's own sub-module
        ([], []),
    ],
)
def test_names_do_not_contain_wrappers(names, canonical):
    assert canonical_names(names) == canonical


def described(model):
    return describe_parameters(canonical_parameters(model))


def test_the_description_of_the_parameters_depends_on_names_shapes_dtypes_and_frozen_parameters():
    variants = [
        nn.Linear(3, 2),
        nn.Linear(2, 3),
        nn.Linear(3, 2, bias=False),
        nn.Linear(3, 2).double(),
        nn.Linear(3, 2).requires_grad_(False),
        nn.Sequential(nn.Linear(3, 2)),
    ]
    assert len({described(model) for model in variants}) == len(variants)
    assert described(model_of()).startswith("60 parameters (and 3 frozen) in 6 tensors, digest ")


def test_the_replica_digest_depends_on_every_bit(pair):
    before = replica_digest(*pair)
    momentum = pair[1].state[pair[0][0].weight]["momentum_buffer"]
    for tensor in (pair[0][2].bias, momentum):
        with torch.no_grad():
            bits = tensor.view(torch.int32).view(-1)
            bits[0] ^= 1
            assert replica_digest(*pair) != before
            bits[0] ^= 1
    assert replica_digest(*pair) == before
    pair[1].param_groups[0]["lr"] *= 2
    assert replica_digest(*pair) != before
