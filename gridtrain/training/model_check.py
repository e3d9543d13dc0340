"""Checks a model for NaN, and its batches for labels, tokens and lengths that the model cannot process.

check_values(model)          when a worker joins: NaN in a parameter, or infinity in a trained one
warn_of_sync_norms(model)    in `grid.optimizer`: SyncBatchNorm, which needs torch.distributed
TokenCheck(model).check(b)   in each batch: labels outside the vocabulary, more tokens than positions
                             in the first batch: no token to predict
                             in the forward pass of a batch: token ids outside the vocabulary
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.data.readers import is_iterable
from gridtrain.training.data.shards import ShardedDataset

log = logging.getLogger("gridtrain")

IGNORED = -100
"""The label of a token that is not predicted."""

MAX_LOOKED_AT = 64
_MAX_OFFSET = 2
"""The maximum number of rows that a table of positions may have in addition to one per position; OPT's has
two."""


def warn_of_sync_norms(model: nn.Module) -> None:
    """Warn about `SyncBatchNorm` layers, which synchronize only within a process group of
    torch.distributed."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        log.warning(
            "the model has %s, such as %r; without a process group of torch, it normalizes each worker's "
            "batch separately -> use BatchNorm1d, 2d or 3d, or GroupNorm; average_buffers_every= averages "
            "running statistics",
            *(format_count(len(names), "SyncBatchNorm"), names[0]),
        )


@torch.no_grad()
def check_values(model: nn.Module) -> None:
    """Raise `ConfigError` if a parameter contains NaN, or a trained parameter contains an infinite value."""
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
                remedy="load the model again: its files may be damaged, new rows or layers may be "
                "uninitialized, or a cast to float16 may have overflowed (use bfloat16)",
            )


class TokenCheck:
    """Checks the batches of a language model from transformers; other models are not checked.

    Token ids outside the vocabulary may be placeholders that the model itself replaces, such as -200 in LLaVA
    and Ovis, -1 and -2 in Phi-3-vision, or the image id in Gemma 3.  They are refused only if the token
    embedding is indexed with them.

    Args:
        look_further: a function that returns batches of one sample each from the whole data set; it is called
            if the first batch has no token to predict.
        is_tokens: whether a batch that is a single tensor contains token ids.
    """

    def __init__(
        self,
        model: nn.Module,
        look_further: Callable[[], Iterable[Any]] = lambda: (),
        *,
        is_tokens: bool = False,
    ) -> None:
        self._look_further, self._is_tokens = look_further, is_tokens
        self._table, self._rows, self._positions = _tables(model)
        self._has_decoder_labels = any(  # of another vocabulary, and all predicted
            getattr(getattr(module, "config", None), "is_encoder_decoder", False)
            for module in model.modules()
        )
        self._is_first, self._has_warned, self._is_watching = True, False, False

    def check(self, batch: Any) -> None:
        """Raise `ConfigError` if the model cannot process the batch."""
        if not self._rows:
            return
        is_named = isinstance(batch, Mapping)
        named = batch if is_named else {"input_ids": batch} if self._is_tokens else {}
        tokens, labels = named.get("input_ids"), named.get("labels")
        if not _is_integral(tokens) or not (self._is_first or tokens.device.type == "cpu"):
            return  # reading a GPU's values makes the CPU wait for the GPU
        if _unknown_id(tokens, self._rows) is not None:
            self._watch_table(tokens)
        if is_named and 0 < self._positions < tokens.shape[-1]:  # a loop may truncate an unnamed tensor
            raise ConfigError(
                f"a sample has {tokens.shape[-1]} tokens, but the model has {self._positions} positions",
                remedy="truncate the samples: tokenizer(..., truncation=True, max_length=...), or pack=",
            )
        if not self._has_decoder_labels and _is_integral(labels) and labels.shape == tokens.shape:
            is_known = (tokens >= 0) & (tokens < self._rows)  # what is predicted for a placeholder is unknown
            _check_ids("labels", self._rows, labels[is_known & (labels != IGNORED)])
            if _predicts_nothing(labels):
                self._refuse_masked()
        self._is_first = False

    def _watch_table(self, tokens: Tensor) -> None:
        """Check, from now on, the ids that index the token embedding; in a pipeline, whose stages use other
        modules, check `tokens` immediately."""
        assert self._table is not None
        if self._table.weight.is_meta:  # a pipeline computes with other modules
            _check_ids("input_ids", self._rows, tokens)
        if not self._is_watching:
            self._is_watching = True
            self._table.register_forward_pre_hook(partial(_check_lookup, self._rows), with_kwargs=True)

    def _refuse_masked(self) -> None:
        """Raise `ConfigError` if neither the first batch nor any sample from `look_further` has a token to
        predict; otherwise warn once."""
        further = self._look_further() if self._is_first else ()
        looked_at = [_predicts_nothing(batch["labels"]) for batch in further]
        if looked_at and all(looked_at):
            raise ConfigError(
                "there is no token to predict: the labels of the first batch and of "
                f"{format_count(len(looked_at), 'sample')} from the whole data set are all {IGNORED}",
                remedy="check what masks the labels: a template that does not mark the answers, or prompts "
                "longer than the maximum length of a sample",
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the labels of a batch are all %d, so its loss may be NaN, in which case the group skips the "
                "step; leave such samples out of the data set",
                IGNORED,
            )


def spread_samples(dataset: Any, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """Yield at most `MAX_LOOKED_AT` batches of one sample each, spread over the whole data set; none if the
    data set is read shard by shard or in its own order."""
    if isinstance(dataset, ShardedDataset) or is_iterable(dataset):
        return
    for index in range(0, len(dataset), max(1, -(-len(dataset) // MAX_LOOKED_AT))):
        yield collate([dataset[index]])


def _unknown_id(ids: Tensor, rows: int) -> int | None:
    """Return an id that is not an index of a table of `rows` rows, or None if there is none."""
    if not ids.numel():
        return None
    least, most = (int(value) for value in ids.aminmax())
    return least if least < 0 else most if most >= rows else None


def _check_ids(name: str, rows: int, ids: Tensor) -> None:
    if (wrong := _unknown_id(ids, rows)) is not None:
        raise ConfigError(
            f"{name} contains the token id {wrong}, but the model's vocabulary has {rows} tokens, "
            f"0 to {rows - 1}",
            remedy="use the tokenizer of this model; if it has new tokens, call "
            "model.resize_token_embeddings(len(tokenizer)) before grid.optimizer, on all workers",
        )


def _check_lookup(rows: int, table: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
    _check_ids("input_ids", rows, args[0] if args else named["input"])


def _is_integral(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() > 0 and value.dtype in (torch.int32, torch.int64)


def _predicts_nothing(labels: Tensor) -> bool:
    return bool((labels[..., 1:] == IGNORED).all())  # nothing predicts the first token


def _tables(model: nn.Module) -> tuple[nn.Embedding | None, int, int]:
    """Return the token embedding, its number of rows, and, if the model has a table of positions, the maximum
    number of tokens in a sample; None or 0 if unknown."""
    for module in model.modules():
        if not hasattr(module, "get_input_embeddings"):
            continue
        try:
            found: Any = module.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
        found = getattr(found, "base_layer", found)  # if PEFT has added an adapter
        rows = getattr(found, "num_embeddings", 0)
        most = getattr(getattr(module, "config", None), "max_position_embeddings", 0) or 0
        tables = {
            m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m is not found
        }
        has_table = isinstance(most, int) and any(most <= size <= most + _MAX_OFFSET for size in tables)
        return found, (rows if isinstance(rows, int) else 0), (most if has_table else 0)
    return None, 0, 0
