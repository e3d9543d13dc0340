"""Nests of tensors as buffers: encoding and decoding, checks against the spec, narrower values on request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_models import layers_of, named, result_of, run, stages_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.pipeline.boundary_specs import infer_boundary_specs
from gridtrain.pipeline.model_blocks import Function
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, split_batch, tensors_in
from gridtrain.pipeline.wire_precision import WirePrecision, decode_tensor, encode_tensor, encoded_bytes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


class Pair(NamedTuple):
    left: Any
    right: Any


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        same = one.dtype == two.dtype and one.shape == two.shape
        return (
            same
            and encode_tensor(one, WirePrecision.EXACT).tolist()
            == encode_tensor(two, WirePrecision.EXACT).tolist()
        )
    if isinstance(one, dict):
        return list(one) == list(two) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    return type(one) is type(two) and one == two


def tensors(samples: int) -> st.SearchStrategy[Tensor]:
    def made(dtype: torch.dtype, rest: list[int], per_sample: bool, seed: int) -> Tensor:
        shape = [samples, *rest] if per_sample else rest
        bits = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
        return (
            (bits > 0) if dtype == torch.bool else (bits / 7 if dtype.is_floating_point else bits).to(dtype)
        )

    shapes = st.lists(st.integers(0, 4), max_size=3)
    return st.builds(made, st.sampled_from(DTYPES), shapes, st.booleans(), st.integers(0, 99))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)


def nests(samples: int) -> st.SearchStrategy[Any]:
    return st.recursive(
        tensors(samples) | scalars,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        ),
        max_leaves=8,
    )


@given(tree=nests(samples=5))
def test_any_nest_is_decoded_as_it_was_encoded(tree: Any) -> None:
    spec = TensorTreeSpec.of(tree, 5)
    buffers = spec.encode(tree, 5)
    assert [buffer.nbytes for buffer in buffers] == [leaf.payload_bytes(5) for leaf in spec.leaves]
    assert sum(buffer.nbytes for buffer in buffers) == spec.payload_bytes(5)
    assert equal(spec.decode([memoryview(bytes(b)) for b in buffers], 5), tree)
    assert spec == TensorTreeSpec.of(tree, 5)
    with torch.device("meta"):  # the script's default device
        again = spec.encode(tree, 5)
        assert [bytes(buffer) for buffer in again] == [bytes(buffer) for buffer in buffers]
        assert equal(spec.decode([memoryview(bytes(b)) for b in buffers], 5), tree)


def test_a_spec_is_printed_readably() -> None:
    tree = {"x": torch.zeros(4, 8), "pair": (torch.zeros(16, dtype=torch.int64), None), "alpha": 0.5}
    assert (
        str(TensorTreeSpec.of(tree, 4)) == "{'x': float32 (n, 8), 'pair': (int64 (4n), None), 'alpha': float}"
    )
    assert str(TensorTreeSpec.of(tree, 4).gradients) == "(float32 (n, 8))"
    assert (
        str(TensorTreeSpec.of([torch.zeros(4, 8)], 3, wire=WirePrecision.INT8)) == "[float32 (4, 8) as int8]"
    )


def test_an_exact_tensor_is_encoded_without_a_copy() -> None:
    tensor = torch.zeros(4, 3)
    (buffer,) = TensorTreeSpec.of(tensor, 4).encode(tensor, 4)
    tensor[0, 0] = 1.0
    assert bytes(buffer[:4]) == b"\x00\x00\x80?"


def test_decoded_tensors_have_their_own_memory() -> None:
    tensor = torch.ones(2, 2)
    spec = TensorTreeSpec.of(tensor, 2)
    spec.decode(spec.encode(tensor, 2), 2).zero_()
    assert torch.equal(tensor, torch.ones(2, 2))


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="older torch takes one operation more")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_single_tensor_takes_few_operations(dtype: torch.dtype) -> None:
    """Each costs 20 to 50 us on a core that did something else before."""
    tensor = torch.arange(8).view(4, 2).to(dtype)
    spec, calls = TensorTreeSpec.of(tensor, 4), Calls()
    with calls:
        sent = spec.encode(tensor, 4)
        back = spec.decode(sent, 4)
    assert calls.count <= 3
    assert sent[0].format == "B" and sent[0].ndim == 1
    assert torch.equal(back, tensor)


def test_gradients_are_a_tuple_and_checked() -> None:
    row = (torch.ones(4, 2), torch.zeros(4, dtype=torch.float64), torch.ones(4, 0))
    spec = TensorTreeSpec.of({"a": row[0], "b": row[1], "c": row[2]}, 4).gradients
    back = spec.decode(spec.encode(row, 4), 4)
    assert type(back) is tuple and all(map(torch.equal, back, row))
    for wrong in ((row[1], row[0], row[2]), row[:2], list(row), (row[0], 1.0, row[2])):
        with pytest.raises(ConfigError, match="was agreed before the step"):
            spec.encode(wrong, 4)
    with pytest.raises(RemoteProtocolError, match="got 2 buffers; expected 3"):
        spec.decode(spec.encode(row, 4)[:2], 4)


EXAMPLE = {"x": torch.zeros(4, 8), "list": [torch.zeros(3, dtype=torch.int64), 7, None, "causal"]}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"x": torch.zeros(4, 9), "list": EXAMPLE["list"]}, r"\['x'\] is torch.float32 \(4, 9\)"),
        ({"x": torch.zeros(3, 8), "list": EXAMPLE["list"]}, r"\['x'\] is torch.float32 \(3, 8\) for n = 4"),
        ({"x": torch.zeros(4, 8, dtype=torch.bfloat16), "list": EXAMPLE["list"]}, "is torch.bfloat16"),
        ({"x": None, "list": EXAMPLE["list"]}, r"\['x'\] is a NoneType"),
        ({"list": EXAMPLE["list"]}, r"a dict with the keys \['list'\]"),
        ({**EXAMPLE, "list": EXAMPLE["list"][:3]}, "a list of 3"),
        ({**EXAMPLE, "list": tuple(EXAMPLE["list"])}, "a tuple"),
        ({**EXAMPLE, "list": [EXAMPLE["list"][0], 7.0, None, "causal"]}, r"\['list'\]\[1\] is a float"),
        ({**EXAMPLE, "list": [EXAMPLE["list"][0], 7, None, "full"]}, r"\['list'\]\[3\] is 'full'"),
    ],
)
def test_an_output_that_does_not_match_the_spec_is_refused_by_its_own_stage(tree: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TensorTreeSpec.of(EXAMPLE, 4).encode(tree, 4)


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        ([b"\x00" * 128], "got 1 buffer; expected 3"),
        ([b"\x00" * 127, b"\x00" * 24, b"\x00" * 8], "buffer 0 has 127 bytes; expected 128"),
        ([b"\x00" * 128, b"\x00" * 24, b""], "buffer 2 has 0 bytes; expected 8 for int"),
        ([b"\x00" * 128, b"\x00" * 24, b"\x00" * 8, b""], "4 buffers"),
    ],
)
def test_bytes_that_do_not_match_the_spec_are_refused(buffers: list[bytes], text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        TensorTreeSpec.of(EXAMPLE, 4).decode([memoryview(buffer) for buffer in buffers], 4)


def test_a_value_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the value at \['a'\]\[0\] is a set"):
        TensorTreeSpec.of({"a": [{1, 2}]}, 1)


def test_a_mini_batch_is_split_along_its_samples() -> None:
    tree = {"x": torch.arange(7), "rest": (torch.arange(14).view(7, 2), None, 3)}
    parts = split_batch(tree, (3, 2, 2))
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert all(part["rest"][1:] == (None, 3) for part in parts)
    assert torch.equal(torch.cat([part["rest"][0] for part in parts]), tree["rest"][0])


class Flatten(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(0, 1), torch.zeros(6)  # 6 rows: a multiple of 2 and of 3


def test_boundaries_distinguish_rows_from_samples() -> None:
    layers = [nn.Linear(3, 4), Flatten()]
    made = infer_boundary_specs(layers, torch.zeros(1, 5, 3))
    assert [str(spec) for spec in made] == ["float32 (n, 5, 4)", "(float32 (5n, 4), float32 (6))"]
    assert [leaf.has_gradient for leaf in made[1].leaves] == [True, False]
    assert next(layers[0].parameters()).device.type == "cpu", "the layers themselves do not move"
    with torch.device("meta"):
        there = [nn.Linear(3, 4), Flatten()]
    assert infer_boundary_specs(there, torch.zeros(1, 5, 3)) == made, "no weights are needed"


class Odd(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        match self.what:
            case "square":
                return x @ x.T
            case "one more":
                return torch.cat([x, x[:1]])
            case "values":
                return x[x > 0]
        return tuple(x)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("square", "only the first dimension may depend on the samples"),
        ("one more", "the number of rows per sample must be fixed"),
        ("values", "cannot run on torch's meta device"),
        ("tuple", "the structure of the values between two layers depends"),
    ],
)
def test_outputs_of_unknown_size_are_refused_before_the_first_step(what: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        infer_boundary_specs([Odd(what)], torch.zeros(2, 3))


class Averages(nn.Module):
    """Subtracts a moving average, which each forward pass changes in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", None if how == "made" else torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if self.how == "written":
            self.mean.mul_(0.5).add_(now)
        elif self.how == "through .data":
            self.mean.data.lerp_(now, 0.5)
        elif self.how == "replaced":
            self.mean = self.mean * 0.5 + now
        elif self.how == "made":
            self.mean = now if self.mean is None else self.mean * 0.5 + now
        elif self.how == "constant":
            self.mean = (
                torch.zeros_like(now) if self.mean is None or len(self.mean) != len(now) else self.mean
            )
        return x - self.mean


@pytest.mark.parametrize("how", ["written", "through .data", "replaced", "made"])
def test_a_buffer_that_two_layers_share_and_change_is_refused(how: str) -> None:
    both = Averages(how)
    with pytest.raises(
        ConfigError,
        match=r'^each forward pass of layer 1, Sequential, changes its buffer "0\.mean", which layers 1 and '
        "3 share; .* -> use a separate module for each layer",
    ):
        infer_boundary_specs([nn.Linear(3, 3), nn.Sequential(both), nn.Linear(3, 3), both], torch.zeros(2, 3))
    infer_boundary_specs([Averages(how), nn.Linear(3, 3), Averages(how)], torch.zeros(2, 3))


def test_a_buffer_that_one_layer_changes_and_another_reads_is_refused() -> None:
    writes, reads = Averages("written"), Averages("never")
    reads.mean = writes.mean
    with pytest.raises(ConfigError, match=r'of layer 1, Averages, .* "mean", which layers 0 and 1 share'):
        infer_boundary_specs([reads, writes], torch.zeros(2, 3))


def test_a_shared_batch_norm_is_refused_unless_it_only_reads_its_statistics() -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ConfigError, match=r'of layer 0, BatchNorm1d, changes its buffer "running_mean"'):
        infer_boundary_specs([norm, nn.Linear(3, 3), norm], torch.zeros(2, 3))
    made = infer_boundary_specs([norm.eval(), nn.Linear(3, 3), norm], torch.zeros(2, 3))
    without = nn.BatchNorm1d(3, track_running_stats=False)
    assert infer_boundary_specs([without, nn.Linear(3, 3), without], torch.zeros(2, 3)) == made


def test_shared_buffers_that_do_not_change_are_accepted() -> None:
    """A table that all layers share, also one that the first forward pass computes or enlarges."""
    mask, table = Averages("never"), Averages("constant")
    table.mean = torch.zeros(1)
    for one in (mask, table):
        made = infer_boundary_specs([one, nn.Linear(3, 3), one], torch.zeros(2, 3))
        assert [str(spec) for spec in made] == ["float32 (n, 3)"] * 3


NARROW = [WirePrecision.FP16, WirePrecision.BF16, WirePrecision.INT8]
STEP = {WirePrecision.FP16: 2.0**-11, WirePrecision.BF16: 2.0**-8, WirePrecision.INT8: 0.5 / 127}


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("elements", [0, 1, 255, 256, 257, 1000])
def test_narrow_values_are_close_and_have_the_stated_size(wire: WirePrecision, elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    for scale in (1e-30, 1e-9, 1.0, 1e30):
        x = torch.randn(elements, generator=generator) * scale
        bytes_ = encode_tensor(x, wire)
        assert bytes_.numel() == encoded_bytes(elements, x.dtype, wire)
        back = decode_tensor(bytes_, x.shape, x.dtype, wire)
        bound = STEP[wire] * (x.abs().max() if wire is WirePrecision.INT8 and elements else x.abs())
        assert bool(((back - x).abs() <= bound * 1.01 + scale * 2.0**-20).all())


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_stay_so(wire: WirePrecision, bad: float) -> None:
    x = torch.randn(600, generator=torch.Generator().manual_seed(0))
    x[300] = bad
    back = decode_tensor(encode_tensor(x, wire), x.shape, x.dtype, wire)
    assert not back[300].isfinite()
    assert bool(back[:256].isfinite().all()) and bool(back[512:].isfinite().all())


@pytest.mark.parametrize("wire", WirePrecision)
@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12.0).view(4, 3)[:, 0],
        torch.arange(12.0).view(4, 3)[:, :1],
        torch.arange(12.0)[::2],
        torch.ones(1).expand(4, 3),
        torch.arange(12.0).view(4, 3).T,
    ],
    ids=["a column", "a narrow matrix", "every second", "one value", "turned"],
)
def test_only_the_viewed_part_of_a_tensor_is_sent(wire: WirePrecision, view: Tensor) -> None:
    for x in (view, view.bfloat16()):
        assert torch.equal(
            encode_tensor(x, wire), encode_tensor(x.clone(memory_format=torch.contiguous_format), wire)
        )


@pytest.mark.parametrize("wire", NARROW)
def test_zeros_stay_zeros(wire: WirePrecision) -> None:
    x = torch.zeros(3, 100)
    assert torch.equal(decode_tensor(encode_tensor(x, wire), x.shape, x.dtype, wire), x)


def test_an_invalid_shift_is_refused() -> None:
    bytes_ = encode_tensor(torch.ones(2), WirePrecision.FP16)
    bytes_[:4] = torch.tensor([0, 0, 0, 0x7F], dtype=torch.uint8)
    with pytest.raises(RemoteProtocolError, match="the maximum is 120"):
        decode_tensor(bytes_, (2,), torch.float32, WirePrecision.FP16)


def test_only_floating_tensors_are_narrowed_and_only_where_it_helps() -> None:
    tree = [torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    assert [leaf.wire for leaf in TensorTreeSpec.of(tree, 2, wire=WirePrecision.FP16).leaves] == [
        WirePrecision.FP16,
        *[WirePrecision.EXACT] * 2,
    ]
    assert [leaf.wire for leaf in TensorTreeSpec.of(tree, 2, wire=WirePrecision.INT8).leaves] == [
        *[WirePrecision.INT8] * 2,
        WirePrecision.EXACT,
    ]


@pytest.mark.parametrize(
    ("wire", "bound"), [(WirePrecision.FP16, 2e-3), (WirePrecision.BF16, 2e-2), (WirePrecision.INT8, 4e-2)]
)
def test_narrow_activations_give_nearby_gradients_in_fewer_bytes(wire: WirePrecision, bound: float) -> None:
    layers, sizes = layers_of(), (3, 3)
    exact, narrow = stages_of(layers, 4), stages_of(layers, 4, wire=wire)
    expected, sent = result_of(exact, run(exact, sizes)), result_of(narrow, run(narrow, sizes))
    whole = sum(g.square().sum() for g in expected.gradients.values()) ** 0.5
    off = sum((sent.gradients[n] - g).square().sum() for n, g in expected.gradients.items()) ** 0.5
    assert 0 < off / whole < bound
    assert narrow[1].output.payload_bytes(3) < exact[1].output.payload_bytes(3)
    assert named(layers).keys() == sent.gradients.keys()


def test_a_layer_that_needs_values_is_named() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy())

    with pytest.raises(ConfigError, match=r"layer 1, Reads, cannot run on torch's meta device.*TypeError"):
        infer_boundary_specs([nn.Identity(), Reads()], torch.ones(2, 2))


@pytest.mark.parametrize(
    "mix", [lambda x, ones: x + ones, lambda x, ones: x.masked_fill(ones > 0, 0.0)], ids=["sum", "mask"]
)
def test_a_layer_that_creates_a_tensor_on_the_cpu_is_told_to_use_the_inputs_device(
    mix: Callable[[Tensor, Tensor], Tensor],
) -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mix(x, torch.ones(x.shape[1]))

    with pytest.raises(ConfigError, match=r"layer 0, Masks, .* -> .* torch\.ones\(n, device=x\.device\)$"):
        infer_boundary_specs([Masks()], torch.ones(2, 2))


def test_inputs_that_do_not_fit_a_layer_are_a_possible_cause() -> None:
    with pytest.raises(ConfigError, match=r"layer 0, Linear, .* -> check the shapes of the inputs"):
        infer_boundary_specs([nn.Linear(3, 3)], torch.ones(2, 4))


def test_a_layer_that_returns_a_tuple_to_one_that_takes_a_tensor_is_named() -> None:
    layers = [nn.Linear(3, 3), nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 3)]
    with pytest.raises(
        ConfigError,
        match=r"layer 2, Linear, cannot .* -> layer 1, LSTM, returns a tuple: .* such as out\[0\]",
    ):
        infer_boundary_specs(layers, torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"\(1, 2, 3\) for 2 samples .* -> .* such as out\[0\] of an LSTM"):
        infer_boundary_specs(layers[:2], torch.zeros(2, 5, 3))


@pytest.mark.parametrize("is_inside", [True, False])
def test_boundaries_have_the_dtypes_of_autocast(is_inside: bool) -> None:
    """The second layer has weights of another dtype, which only autocast makes possible."""

    def cast(enabled: bool) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            with cast(True) if is_inside else nullcontext():
                return self.linear(x)

    layers = [Cast(torch.float32), Cast(torch.bfloat16), nn.Dropout(0.1), Function(Tensor.float)]
    with cast(not is_inside):
        made = infer_boundary_specs(layers, torch.zeros(1, 3))
    assert [str(spec) for spec in made] == ["bfloat16 (n, 3)"] * 3 + ["float32 (n, 3)"]
    assert all(leaf.has_gradient for spec in made for leaf in spec.leaves)


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="this torch always compiles")
def test_code_is_never_compiled_for_tensors_without_memory() -> None:
    compiled_for: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_for.extend(tensor.device.type for tensor in tensors_in(list(inputs)))
        return graph.forward

    torch._dynamo.reset()
    layer = torch.compile(nn.Linear(3, 3), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = infer_boundary_specs([layer], torch.zeros(1, 3))
    assert str(made[0]) == "bfloat16 (n, 3)" and not compiled_for


@pytest.mark.parametrize("can_disable", [True, False])
def test_a_layer_that_fails_under_autocast_is_reported_with_dtype_and_device(
    can_disable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_disable:
        monkeypatch.delattr(torch.compiler, "set_stance", raising=False)
    elif not hasattr(torch.compiler, "set_stance"):
        pytest.skip("this torch always compiles")
    layers = [Function(lambda x: x.numpy())]
    cause = r" \(compiled layers can from torch 2\.6 on; this is .*\)" * (not can_disable)
    message = rf"layer 0, Function, cannot run under autocast to torch\.bfloat16 on cpu{cause}, without data"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match=message):
        infer_boundary_specs(layers, torch.ones(2, 2))


def test_a_dict_of_another_kind_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"is an OrderedDict, which cannot be sent.*, lists and dicts"):
        infer_boundary_specs([Function(lambda x: OrderedDict(x=x))], torch.ones(2, 2))
