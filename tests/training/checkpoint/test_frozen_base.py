"""The frozen base: no state, checkpoint or replica digest contains it; its own digest covers every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from absent_names import absent_names
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.training.checkpoint import frozen_base, serialization
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.checkpoint.frozen_base import FrozenBase, is_base, state_parameters
from gridtrain.training.checkpoint.model_export import model_tensors


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two small matrices that is trained."""

    def __init__(self, width: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width, dtype=dtype) / width)
        self.up = nn.Parameter(torch.zeros(width, rank, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Language(nn.Module):
    """Tied embeddings, which are frozen, around adapted layers."""

    def __init__(
        self, *, tokens: int = 11, width: int = 16, rank: int = 2, dtype: Any = torch.float32
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width, dtype=dtype).requires_grad_(False)
        self.layers = nn.Sequential(Adapted(width, rank, dtype), nn.BatchNorm1d(width, dtype=dtype))
        self.head = nn.Linear(width, tokens, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


def language(seed: int = 0, **options: Any) -> Language:
    torch.manual_seed(seed)
    return Language(**options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 11, (8,), generator=generator)
        nn.functional.cross_entropy(model(ids).float(), ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


TRAINED = ["layers.0.down", "layers.0.up", "layers.1.weight", "layers.1.bias"]
FROZEN = ["embed.weight", "layers.0.base.weight", "layers.0.base.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_state_contains_only_trained_parameters(dtype: torch.dtype) -> None:
    """`restore_state` makes a worker with the same base equal to the last bit."""
    model, joiner = language(width=64, dtype=dtype), language(width=64, dtype=dtype)
    optimizer, joined = adamw(model), adamw(joiner)
    FrozenBase(model), FrozenBase(joiner)
    train(model, optimizer)
    private, shared = serialization.capture_state(model, optimizer, {})
    moments = [x for state in optimizer.state.values() for x in state.values()]
    trained = nbytes(p for p in model.parameters() if p.requires_grad) + nbytes(model.buffers())
    assert len(private) + len(shared) < trained + nbytes(moments) + 4000 < nbytes(model.parameters())

    serialization.restore_state([private, shared], joiner, joined, {})
    train(model, optimizer)
    train(joiner, joined)
    for (name, one), (_, other) in zip(model.state_dict().items(), joiner.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert serialization.replica_digest(model, optimizer) == serialization.replica_digest(joiner, joined)


def test_a_checkpoint_names_missing_parameters() -> None:
    model = language()
    FrozenBase(model)
    document, tensors = serialization.pack_state(model, adamw(model), {})
    assert [name for name, _ in state_parameters(model)] == TRAINED
    assert document[frozen_base.FROZEN_KEY] == absent_names(document) == FROZEN
    assert document["aliases"] == {}, "head.weight is another name of a tensor that is absent"
    assert sorted(model_tensors(document, tensors)) == sorted([*TRAINED, *dict(model.named_buffers())])


def test_a_model_without_frozen_parameters_has_no_base() -> None:
    model = language()
    model.requires_grad_(True)
    before = serialization.capture_state(model, adamw(model), {})
    base = FrozenBase(model)
    document, _ = serialization.pack_state(model, adamw(model), {})
    assert serialization.capture_state(model, adamw(model), {}) == before
    assert (base.facts(), base.describe(), absent_names(document)) == ((), "", [])
    assert frozen_base.FROZEN_KEY not in document and document["aliases"] == {"head.weight": "embed.weight"}


def test_parameters_frozen_in_an_earlier_run_are_sent_when_they_are_trained() -> None:
    model = language()
    FrozenBase(model)
    model.requires_grad_(True)
    FrozenBase(model)
    assert not any(is_base(p) for p in model.parameters())


# -- the digest ------------------------------------------------------------------------------------------


def _negate_one_zero(model: Language) -> None:
    with torch.no_grad():
        model.embed.weight[3, 2] = -0.0


CHANGES: dict[str, Callable[[Language], Any]] = {
    "a bit": _negate_one_zero,
    "a dtype": lambda model: setattr(
        model.layers[0].base, "bias", _as(model.layers[0].base.bias, torch.int32)
    ),
    "a shape": lambda model: setattr(
        model.layers[0].base, "weight", nn.Parameter(model.layers[0].base.weight.view(8, 32), False)
    ),
    "a name": lambda model: setattr(model, "renamed", model._modules.pop("embed")),
    "one tensor less": lambda model: model.layers[0].base.bias.requires_grad_(True),
}


def _as(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(parameter.detach().view(dtype), requires_grad=False)


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_depends_on_each_property(change: str) -> None:
    models = [language(), language()]
    for model in models:
        model.embed.weight.data[3, 2] = 0.0
    first = FrozenBase(models[0]).digest()
    assert FrozenBase(models[1]).digest() == first
    CHANGES[change](models[1])
    assert FrozenBase(models[1]).digest() != first


def test_the_digest_depends_neither_on_trained_values_nor_on_strides_nor_on_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = language()
    first = FrozenBase(model).digest()
    train(model, adamw(model))
    model.layers[0].base.weight.data = model.layers[0].base.weight.data.T.contiguous().T
    assert not model.layers[0].base.weight.is_contiguous()
    monkeypatch.setattr(frozen_base, "_CHUNK_BYTES", 100)
    assert FrozenBase(model).digest() == first


@torch.no_grad()
def with_more_tokens(seed: int) -> Language:
    """As `resize_token_embeddings`: copied rows, and new ones that are drawn."""
    model = language()
    torch.manual_seed(seed)
    rows = torch.cat([model.embed.weight, torch.randn(3, 16)])
    model.embed.weight = model.head.weight = nn.Parameter(rows, requires_grad=False)
    return model


def test_added_rows_are_equal_if_the_script_sets_the_seed() -> None:
    one, same, other = with_more_tokens(1), with_more_tokens(1), with_more_tokens(2)
    assert FrozenBase(one).digest() == FrozenBase(same).digest() != FrozenBase(other).digest()
    facts = [FrozenBase(model, sent=["embed.weight"]).facts() for model in (one, other)]
    assert facts[0] == facts[1]
    document, _ = serialization.pack_state(one, adamw(one), {})
    assert document["aliases"] == {"head.weight": "embed.weight"} and "embed.weight" not in absent_names(
        document
    )


def test_a_compiled_model_has_the_same_base() -> None:
    model = language()
    digest, compiled = FrozenBase(model).digest(), torch.compile(language(), backend="eager")
    base = FrozenBase(compiled)
    assert base.digest() == digest
    assert [name for name, _ in state_parameters(compiled)] == TRAINED
    assert absent_names(serialization.pack_state(compiled, adamw(compiled), {})[0]) == FROZEN


def test_the_tensors_inside_of_a_wrapper_are_read() -> None:
    """Quantized tensors are wrappers of packed values and scales."""

    def wrapped(scale: float) -> FrozenBase:
        model = nn.Linear(4, 4)
        values = TwoTensor(torch.ones(4, 4), torch.full((4, 4), scale))
        model.weight = nn.Parameter(values, requires_grad=False)
        return FrozenBase(model)

    assert wrapped(1.0).digest() == wrapped(1.0).digest() != wrapped(2.0).digest()
    assert wrapped(1.0).describe().startswith("128 B in 1 frozen tensor, digest ")


def test_the_scales_of_4_bit_tensors_are_read() -> None:
    """As in bitsandbytes' `Params4bit`; its values may be repacked later, which is no change of the base."""

    def scaled(scale: float) -> FrozenBase:
        packed = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
        parts = {"absmax": torch.tensor([scale]), "quant_map": torch.ones(16)}
        packed.quant_state = SimpleNamespace(as_dict=lambda packed: parts if packed else {})  # type: ignore[attr-defined]
        return FrozenBase(nn.ParameterDict({"packed": packed}))

    base = scaled(1.0)
    assert base.digest() == scaled(1.0).digest() != scaled(2.0).digest()
    base._model.packed.data.add_(1)  # type: ignore[union-attr, operator]
    base.check_unchanged()


class EightBits(nn.Parameter):
    """As bitsandbytes' `Int8Params`: one scale for each row, and a second copy of the values."""

    SCB: torch.Tensor | None
    CB: torch.Tensor | None

    def __new__(cls, scale: float, again: torch.Tensor | None = None) -> EightBits:
        values = torch.arange(8, dtype=torch.int8).view(2, 4)
        made: EightBits = torch.Tensor._make_subclass(cls, values, False)
        made.SCB, made.CB = torch.tensor([scale, 1.0]), values if again is None else again
        return made


def in_eight_bits(scale: float, again: torch.Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = EightBits(scale, again)
    layer.state = SimpleNamespace(SCB=None, CB=None)  # type: ignore[assignment]
    return layer


def test_the_scales_of_8_bit_tensors_are_read() -> None:
    base = FrozenBase(in_eight_bits(1.0))
    assert base.digest() == FrozenBase(in_eight_bits(1.0)).digest()
    assert base.digest() != FrozenBase(in_eight_bits(2.0)).digest()
    assert base.nbytes == 8 + 2 * 4


def test_values_of_8_bit_tensors_that_differ_from_the_parameter_are_read() -> None:
    same, other = torch.arange(8, dtype=torch.int8).view(2, 4), torch.zeros(2, 4, dtype=torch.int8)
    digests = [FrozenBase(in_eight_bits(1.0, again)).digest() for again in (None, same, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_moving_the_scales_of_8_bit_tensors_is_no_change_of_the_base(scale: float) -> None:
    """As `Linear8bitLt.init_8bit_state`."""
    layer = in_eight_bits(scale)
    weight, state = layer.weight, layer.state
    state.SCB, state.CB, weight.SCB, weight.CB = weight.SCB, weight.CB, None, None  # type: ignore[attr-defined, union-attr]
    assert FrozenBase(layer).facts() == FrozenBase(in_eight_bits(scale)).facts()


def test_the_context_of_a_wrapper_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(context: Any) -> bytes:
        model = nn.Linear(4, 4, bias=False)
        values = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
        model.weight = nn.Parameter(values, requires_grad=False)
        monkeypatch.setattr(TwoTensor, "__tensor_flatten__", lambda self: (["a", "b"], context))
        return FrozenBase(model).digest()

    first = described({"block": 32, "function": object(), "device": torch.device("cpu")})
    assert first == described({"block": 32, "function": object(), "device": torch.device("cuda", 1)})
    assert first != described({"block": 64, "function": object(), "device": torch.device("cpu")})


@pytest.mark.parametrize(
    "state", [SimpleNamespace(), SimpleNamespace(as_dict=lambda: {})], ids=["AttributeError", "TypeError"]
)
def test_scales_that_cannot_be_read_are_reported(state: Any) -> None:
    packed = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = state  # type: ignore[attr-defined]
    model = nn.ParameterDict({"packed": packed})
    with pytest.raises(
        ConfigError, match=r"'packed' cannot be read: it is a Parameter on cpu: .*as_dict|lambda"
    ):
        FrozenBase(model).facts()
    assert FrozenBase(model, rule="any").describe() == "8 B in 1 frozen tensor, digest unknown"


def test_the_description_is_the_fact() -> None:
    model = language()
    base = FrozenBase(model)
    expected = f"1.79 kB in 3 frozen tensors, digest {base.digest().hex()[:12]}"
    assert base.nbytes == nbytes(dict(model.named_parameters())[name] for name in FROZEN) == 1792
    assert base.facts() == (("base", expected),)
    assert base.describe_model().startswith("96 parameters (and 448 frozen) in 7 tensors, digest ")


def test_missing_values_are_reported() -> None:
    model = language()
    model.embed.to("meta")
    model.head.weight = model.embed.weight
    with pytest.raises(
        ConfigError, match=r"'embed\.weight' cannot be read: it is a Parameter on meta"
    ) as caught:
        FrozenBase(model).facts()
    assert "load the model completely before" in caught.value.remedy
    base = FrozenBase(model, rule="any")
    assert base.describe().endswith("digest unknown") and base.facts() == (("base", "any"),)


# -- another base ----------------------------------------------------------------------------------------


def test_workers_with_differently_quantized_bases_describe_the_same_model() -> None:
    exact, coarse = language(), language()
    coarse.layers[0].base.to(torch.bfloat16)
    described = [FrozenBase(model, rule="any").describe_model() for model in (exact, coarse)]
    assert described[0] == described[1]
    assert described[0].startswith("96 parameters in 4 tensors, digest ")
    assert len({FrozenBase(model).describe_model() for model in (exact, coarse)}) == 2
    assert len({FrozenBase(model, rule="any").describe() for model in (exact, coarse)}) == 2


@pytest.mark.parametrize("options", [{"rule": "some"}, {"sent": ["embed"]}, {"sent": ["layers.0.down"]}])
def test_invalid_options_of_the_base_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"^base is 'some'|no frozen parameter matches it"):
        FrozenBase(language(), **options)


def test_named_parameters_are_sent_although_they_are_frozen() -> None:
    model, joiner = language(0), language(1)
    for each in (model, joiner):
        base = FrozenBase(each, sent=["*.base.*", "embed.weight"])
        assert base.facts() == ()
    assert serialization.initial_digest(model, adamw(model), {}) != serialization.initial_digest(
        joiner, adamw(joiner), {}
    )
    blobs = serialization.capture_state(model, adamw(model), {})
    serialization.restore_state(blobs, joiner, adamw(joiner), {})
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), joiner.parameters(), strict=True)
    )
    some = FrozenBase(model, sent="embed.*")
    assert [name for name, p in canonical_parameters(model) if is_base(p)] == FROZEN[1:]
    assert "in 2 frozen tensors" in some.describe()


# -- states of earlier versions, which contain the base ---------------------------------------------------


def old_state(seed: int = 0) -> list[bytes]:
    model = language(seed)
    optimizer = adamw(model)
    train(model, optimizer)
    return list(serialization.capture_state(model, optimizer, {}))


def test_a_state_that_contains_the_same_base_is_loaded() -> None:
    blobs, model = old_state(), language()
    expected = copy.deepcopy(model)
    train(expected, adamw(expected))
    FrozenBase(model)
    serialization.restore_state(blobs, model, adamw(model), {})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_state_that_contains_another_base_is_refused_and_changes_nothing() -> None:
    blobs, model = old_state(seed=1), language()
    before = copy.deepcopy(model.state_dict())
    FrozenBase(model)
    with pytest.raises(RemoteProtocolError, match=r"trained on a different base: .* '.*' differs") as caught:
        serialization.restore_state(blobs, model, adamw(model), {})
    assert "load the base with which the run was started" in caught.value.remedy
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_peer_cannot_name_a_wrapped_tensor() -> None:
    model = language()
    values = TwoTensor(model.embed.weight.detach(), model.embed.weight.detach())
    model.embed.weight = nn.Parameter(values, requires_grad=False)
    FrozenBase(model)
    with pytest.raises(RemoteProtocolError, match="a different base"):
        frozen_base.without_base(model, {"embed.weight": torch.zeros(11, 16)})


# -- a base that changes -----------------------------------------------------------------------------------


def test_changed_frozen_parameters_are_found() -> None:
    """For example a momentum encoder, which the states of other workers would lack."""
    model = language()
    base = FrozenBase(model)
    base.check_unchanged()  # the script may load values until the worker joins
    model.layers[0].base.weight.data.mul_(0.5)
    base.facts()
    for _ in range(5):
        base.check_sometimes()
    model.layers[0].base.weight.data.mul_(0.99)
    for _ in range(2):
        base.check_sometimes()  # the sixth and the seventh call
    with pytest.raises(ConfigError, match=r"^1 frozen .* 'layers\.0\.base\.weight'; they") as caught:
        base.check_sometimes()
    assert "send_frozen" in caught.value.remedy and "unmerge_adapter()" in caught.value.remedy
    with pytest.raises(ConfigError):
        base.check_unchanged()


@pytest.mark.parametrize(
    ("name", "revision", "origin"),
    [
        ("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca", "Qwen/Qwen3-0.6B@c1899de289a0"),
        ("gpt2", None, "gpt2"),
        ("FOLDER", None, "my-model"),
        ("/private/removed/model", None, "model"),
        ("../private/removed", None, "removed"),
        ("private/removed/model/", None, "model"),
        (None, None, ""),
    ],
)
def test_the_origin_is_a_name_on_the_hub_or_that_of_a_folder(
    name: Any, revision: Any, origin: str, tmp_path: Path
) -> None:
    """The path of a folder is private to this worker."""
    (tmp_path / "my-model").mkdir()
    model = language()
    model.config = SimpleNamespace(
        _name_or_path=str(tmp_path / "my-model") if name == "FOLDER" else name, _commit_hash=revision
    )
    assert FrozenBase(model).origin == origin
    assert FrozenBase(model.requires_grad_(True)).origin == "", "it has no base"
