"""A model and batches that cannot work, told apart from those that only look odd."""

from __future__ import annotations

import logging
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError
from gridtrain.training.model_check import IGNORED, MAX_LOOKED_AT, TokenCheck, check_values, spread_samples

ROWS, POSITIONS = 10, 6
NAN, INF = float("nan"), float("inf")


class Model(nn.Module):
    """As those of transformers: a table of tokens, and perhaps one of positions."""

    def __init__(self, *, positions: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, 2)
        self.config = SimpleNamespace(max_position_embeddings=POSITIONS)
        if positions:
            self.positions = nn.Embedding(positions, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        result: Tensor = self.tokens(input_ids)
        return result


class ImageModel(Model):
    """It replaces the places of images itself, as LLaVA does."""

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        pieces = [self.tokens(ids[ids >= 0]) for ids in input_ids]
        return torch.stack(pieces)


def batch(*ids: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels or ids])}


@pytest.mark.parametrize(
    ("value", "trained", "dtype", "told"),
    [
        (NAN, False, torch.float32, r"^1 of 20 values of the frozen parameter 'tokens.weight' are NaN \("),
        (NAN, False, torch.bfloat16, "torch.bfloat16"),
        (NAN, True, torch.float32, "of the trained parameter 'tokens.weight' are NaN or infinite"),
        (-INF, True, torch.float16, "of the trained parameter 'tokens.weight' are NaN or infinite"),
        (INF, False, torch.float32, ""),  # such as a mask
        (3e38, True, torch.float32, ""),  # the sum of two is infinite, they are not
    ],
)
def test_values(value: float, trained: bool, dtype: torch.dtype, told: str) -> None:
    model = Model().to(dtype).requires_grad_(trained)
    with torch.no_grad():
        model.tokens.weight[1 if value != 3e38 else slice(1, 3), 0] = value
    if not told:
        check_values(model)
        return
    with pytest.raises(ConfigError, match=re.compile(told)):
        check_values(model)


def test_values_that_cannot_be_looked_at_are_left_alone() -> None:
    with torch.device("meta"):
        check_values(Model())
    empty = nn.Module()
    empty.register_parameter("none", nn.Parameter(torch.zeros(0)))
    check_values(empty)


@pytest.mark.parametrize(
    ("positions", "given", "told"),
    [
        (0, batch(0, 9), ""),
        (
            0,
            batch(0, 10),
            "^input_ids contains the token id 10, but the model's vocabulary has 10 tokens, 0 to 9 -> ",
        ),
        (0, batch(0, -1), "^input_ids contains the token id -1"),
        (0, batch(0, 1, labels=(-100, 10)), "labels contains the token id 10"),
        (0, batch(0, 1, labels=(-100, 9)), ""),
        (0, batch(*[1] * 7), ""),  # rotary positions have no table
        (POSITIONS, batch(*[1] * 6), ""),
        (POSITIONS, batch(*[1] * 7), "^a sample has 7 tokens, but the model has 6 positions -> "),
        (POSITIONS + 2, batch(*[1] * 7), "^a sample has 7 tokens, but the model has 6 positions -> "),
        (0, torch.tensor([[99]]), ""),  # what a loop makes of it is unknown
        (0, {"input_ids": torch.tensor([[0.5]])}, ""),
    ],
    ids=str,
)
def test_batches(positions: int, given: Any, told: str) -> None:
    model = Model(positions=positions)
    check = TokenCheck(nn.Sequential(model))
    if not told:
        check.check(given)
        return
    with pytest.raises(ConfigError, match=told):
        check.check(given)
        model(**given)


@pytest.mark.parametrize(
    ("model", "ids", "told"),
    [
        (ImageModel, (3, -200, 9), ""),
        (ImageModel, (3, -200, 10), "input_ids contains the token id 10"),
        (Model, (3, -200, 9), "input_ids contains the token id -200"),
    ],
)
def test_a_placeholder_passes_if_the_table_is_not_indexed_with_it(
    model: type[Model], ids: tuple[int, ...], told: str
) -> None:
    made = model()
    check = TokenCheck(made)
    for given in (batch(1, 2), batch(*ids, labels=ids), batch(*ids, labels=(IGNORED, *ids[1:]))):
        check.check(given)
        copied = pickle.loads(pickle.dumps(made))  # as `torch.save` does
        if not told or given["input_ids"].shape[1] == 2:
            made(**given)
            continue
        for each in (made, copied):
            with pytest.raises(ConfigError, match=told):
                each(**given)
    assert len(made.tokens._forward_pre_hooks) == 1


def test_a_pipeline_knows_no_placeholders() -> None:
    with torch.device("meta"):
        check = TokenCheck(ImageModel())
    with pytest.raises(ConfigError, match="input_ids contains the token id -200"):
        check.check(batch(3, -200, 9))


def test_a_packed_sequence_has_token_ids_and_may_be_cut_by_the_loop() -> None:
    model = Model(positions=POSITIONS)
    check = TokenCheck(model, is_tokens=True)
    check.check(torch.ones(2, POSITIONS + 1, dtype=torch.long))
    check.check(torch.full((2, 3), 10))
    with pytest.raises(ConfigError, match="token id 10"):
        model(torch.full((2, 3), 10))


def test_a_later_batch_is_checked_too_and_other_models_are_not() -> None:
    model = Model()
    check = TokenCheck(model)
    check.check(batch(1, 2))
    check.check(batch(1, 10, labels=(-100, 9)))
    with pytest.raises(ConfigError, match="token id 10"):
        model(**batch(1, 10))
    TokenCheck(nn.Linear(2, 2)).check(batch(1, 10))


@pytest.mark.parametrize("masked", [8, 7])
def test_a_data_set_without_a_token_to_predict(masked: int, caplog: pytest.LogCaptureFixture) -> None:
    nothing, something = batch(1, 2, labels=(2, -100)), batch(1, 2, labels=(-100, 2))
    data = [nothing] * masked + [something] * (8 - masked)
    check = TokenCheck(Model(), lambda: spread_samples(data, lambda samples: samples[0]))
    caplog.set_level(logging.WARNING, "gridtrain")
    if masked == 8:
        with pytest.raises(
            ConfigError, match=r"there is no token to predict: .* of 8 samples .* all -100 -> "
        ):
            check.check(nothing)
        return
    for _ in range(3):
        check.check(nothing)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "the labels of a batch are all -100"
    ]


def test_samples_are_spread_over_the_data_set() -> None:
    looked_at = list(spread_samples(range(1000), lambda samples: samples[0]))
    assert len(looked_at) <= MAX_LOOKED_AT and looked_at[0] == 0 and looked_at[-1] >= 984
    assert list(spread_samples(range(3), lambda samples: samples[0])) == [0, 1, 2]
    assert list(spread_samples(iter(range(3)), lambda samples: samples[0])) == []
