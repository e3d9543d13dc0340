"""What cannot work in a model or its batches, found before the first step rather than in a library.

check_values(model)          when a worker joins: NaN in a parameter
TokenCheck(model).check(b)   each batch: token ids that the model does not have, more tokens than positions
                             the first batch: no token to predict
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.data.readers import is_iterable
from gridtrain.training.data.shards import ShardedDataset

log = logging.getLogger("gridtrain")

IGNORED = -100
"""The label of a token that is not predicted."""

MOST_LOOKED_AT = 64
_MOST_OFFSET = 2
"""OPT, for example, has so many rows of positions more than positions."""


@torch.no_grad()
def check_values(model: nn.Module) -> None:
    """Raise `ConfigError` if a parameter has NaN, or a trained one an infinite value."""
    for name, parameter in canonical_parameters(model):
        plain = parameter.is_floating_point() and not hasattr(parameter, "__tensor_flatten__")
        if not plain or parameter.is_meta or parameter.element_size() == 1 or not parameter.numel():
            continue
        if math.isfinite(parameter.detach().sum(dtype=torch.float32).item()):
            continue  # a finite sum has finite terms; finite terms may have an infinite sum
        wrong = parameter.isnan() if not parameter.requires_grad else ~parameter.isfinite()
        if count := int(wrong.sum()):
            kind = "trained" if parameter.requires_grad else "frozen"
            raise ConfigError(
                f"{count} of {parameter.numel()} values of the {kind} parameter {name!r} are NaN"
                + (" or infinite" if parameter.requires_grad else "")
                + f" ({parameter.dtype}), so every loss would be NaN",
                remedy="load the model again: its files may be damaged, new rows or layers not be "
                "initialized, or a cast to float16 have overflowed (use bfloat16)",
            )


class TokenCheck:
    """Checks the batches of a language model of transformers; of other models it knows nothing.

    Args:
        look_further: returns, one by one, batches of samples from the whole data set; called if the first
            batch has no token to predict.
        is_tokens: whether a batch that is a single tensor has token ids.
    """

    def __init__(
        self,
        model: nn.Module,
        look_further: Callable[[], Iterable[Any]] = lambda: (),
        *,
        is_tokens: bool = False,
    ) -> None:
        self._look_further, self._is_tokens = look_further, is_tokens
        self._rows, self._positions = _table_sizes(model)
        self._has_decoder_labels = any(  # of another vocabulary, and none is without a prediction
            getattr(getattr(module, "config", None), "is_encoder_decoder", False)
            for module in model.modules()
        )
        self._is_first, self._has_warned = True, False

    def check(self, batch: Any) -> None:
        """Raise `ConfigError` if the model cannot compute the batch."""
        if not self._rows:
            return
        is_named = isinstance(batch, Mapping)
        named = batch if is_named else {"input_ids": batch} if self._is_tokens else {}
        tokens, labels = named.get("input_ids"), named.get("labels")
        if not _is_integral(tokens) or not (self._is_first or tokens.device.type == "cpu"):
            return  # to look at a GPU's values makes the CPU wait for the GPU
        self._check_ids("input_ids", tokens)
        if is_named and 0 < self._positions < tokens.shape[-1]:  # a loop may cut what has no name
            raise ConfigError(
                f"a sample has {tokens.shape[-1]} tokens, but the model has {self._positions} positions",
                remedy="cut the samples: tokenizer(..., truncation=True, max_length=...), or pack=",
            )
        if not self._has_decoder_labels and _is_integral(labels) and labels.shape == tokens.shape:
            self._check_ids("labels", labels[labels != IGNORED])
            if _predicts_nothing(labels):
                self._refuse_masked()
        self._is_first = False

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if not ids.numel():
            return
        least, most = (int(value) for value in ids.aminmax())
        if least < 0 or most >= self._rows:
            wrong = least if least < 0 else most
            raise ConfigError(
                f"{name} has the token id {wrong}, but the model's vocabulary has {self._rows} tokens, 0 to "
                f"{self._rows - 1}",
                remedy="use the tokenizer of this model; if it has new tokens, call "
                "model.resize_token_embeddings(len(tokenizer)) before grid.optimizer, on all workers",
            )

    def _refuse_masked(self) -> None:
        """Raise `ConfigError` if no sample has a token to predict; otherwise warn once."""
        looked_at = (
            [_predicts_nothing(batch["labels"]) for batch in self._look_further()] if self._is_first else []
        )
        if looked_at and all(looked_at):
            raise ConfigError(
                f"no token is to be predicted: the labels of the first batch and of {len(looked_at)} samples "
                f"from the whole data set are all {IGNORED}",
                remedy="check what masks the labels: a template that does not mark the answers, or prompts "
                "that are longer than the samples may be",
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the labels of a batch are all %d, so that its loss may be NaN, with which the group skips "
                "the step; leave such samples out of the data set",
                IGNORED,
            )


def spread_samples(dataset: Any, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """Yield batches of one sample from the whole data set, at most `MOST_LOOKED_AT`; none if the data set is
    read by shards or in its own order."""
    if isinstance(dataset, ShardedDataset) or is_iterable(dataset):
        return
    for index in range(0, len(dataset), max(1, -(-len(dataset) // MOST_LOOKED_AT))):
        yield collate([dataset[index]])


def _is_integral(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() > 0 and value.dtype in (torch.int32, torch.int64)


def _predicts_nothing(labels: Tensor) -> bool:
    return bool((labels[..., 1:] == IGNORED).all())  # nothing predicts the first token


def _table_sizes(model: nn.Module) -> tuple[int, int]:
    """Return the number of token ids, and the largest number of tokens of a sample if the model has a table
    of positions; 0 for each that is unknown."""
    for module in model.modules():
        if not hasattr(module, "get_input_embeddings"):
            continue
        try:
            found: Any = module.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
        found = getattr(found, "base_layer", found)  # PEFT's adapter of it
        rows = getattr(found, "num_embeddings", 0)
        most = getattr(getattr(module, "config", None), "max_position_embeddings", 0) or 0
        tables = {
            m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m is not found
        }
        has_table = isinstance(most, int) and any(most <= size <= most + _MOST_OFFSET for size in tables)
        return (rows if isinstance(rows, int) else 0), (most if has_table else 0)
    return 0, 0
