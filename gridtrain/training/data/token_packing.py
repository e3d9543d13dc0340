"""Packing: tokenizes documents, joins their tokens and cuts the result into sequences of equal length.

    documents, in an order that the seed determines   [7 3 9 0] [4 0] [8 8 2 6 0]
    sequences of 4 tokens                             7 3 9 0 | 4 0 8 8 | 2 6 0 (dropped: 3 tokens)

Each sequence is a sample, so every sample has the same number of tokens: a batch of 8 sequences of 1,024
tokens has 8,192 tokens.  The index records each shard's token count, so the number of sequences is known for
any length.  The tokens that remain at the end of each shard, too few for a sequence, are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gridtrain.extras import require

Tokenize = Callable[[Any], Sequence[int]]
"""A function that converts a sample to its tokens, the last of which separates documents."""

END_OF_TEXT = 256
"""The token that the tokenizer "bytes" appends to each document; its other tokens are the bytes of UTF-8."""


def tokenizer_named(name: str, text_field: str = "text") -> Tokenize:
    """Return a function that converts a sample to its tokens; it raises `ValueError` for a sample without
    text.

    Args:
        name: "bytes", or the name or folder of a tokenizer for `transformers.AutoTokenizer`, whose
            end-of-sequence token is appended to each document.
        text_field: the field with the text, if samples are not strings themselves.
    """
    if name == "bytes":
        return partial(_byte_tokens, text_field)
    require("transformers", f"the tokenizer {name}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return partial(_model_tokens, tokenizer, end, text_field)


def _byte_tokens(text_field: str, sample: Any) -> list[int]:
    return [*_text_of(sample, text_field).encode(), END_OF_TEXT]


def _model_tokens(tokenizer: Any, end: list[int], text_field: str, sample: Any) -> list[int]:
    return [*tokenizer(_text_of(sample, text_field), add_special_tokens=False).input_ids, *end]


def _text_of(sample: Any, text_field: str) -> str:
    text = sample.get(text_field) if isinstance(sample, dict) else sample
    if not isinstance(text, str):
        raise ValueError(f"it has no text in the field {text_field!r}")
    return text


def pack(count: int, read: Callable[[int], Any], tokenize: Tokenize, seed: int) -> npt.NDArray[np.int32]:
    """Return the tokens of all samples of a shard, in an order that `seed` determines: (tokens,).

    Args:
        count: the number of samples.
        read: a function that returns the sample with a given number.
    """
    order = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).permutation(count)
    parts = [np.asarray(tokenize(read(number)), np.int32) for number in order.tolist()]
    return np.concatenate([*parts, np.empty(0, np.int32)])
