"""A small Llama and its tokenizer, for examples and templates, in a folder that `from_pretrained` can load.

    small_llama()    --> folder: config.json, model.safetensors, tokenizer.json, ...
    tokens           one for each byte of UTF-8, and one for the end of a text
    model            2 layers of width 128, 361,344 parameters

The model's weights are computed from the SHAKE-128 digests of their names, so that all workers have equal
weights without a download.  torch's `normal_` would draw different bits on different processors.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gridtrain.extras import require

if TYPE_CHECKING:
    from torch import Tensor

END = "<|end|>"
CONTEXT = 256
FOLDER = ".small-llama-2"  # numbered, because an existing folder is never rewritten

SPREAD = 0.1  # standard deviation; large, so that adapters alone can learn something

_WHO = "gridtrain.tools.demo.small_llama"


def small_llama(folder: Path | None = None) -> str:
    """Return the path of a folder with the model and its tokenizer; the first call writes them.

    Args:
        folder: by default a hidden folder beside the runs' folders, with a name that no run can have.

    Raises:
        ConfigError: transformers is not installed.
        OSError: the folder cannot be written.
    """
    states = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = states / "gridtrain" / FOLDER if folder is None else folder
    if folder.is_dir():
        return str(folder)
    require("transformers", _WHO)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(partial)
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another worker on this machine was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return str(folder)


def _write(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    tokens = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token=END,
        pad_token=END,
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token types otherwise
    )
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # the weights of the norms are 1
                weight.copy_(_drawn(name, weight.numel()).view_as(weight))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _drawn(name: str, count: int) -> Tensor:
    """Return values with a standard deviation of about `SPREAD`, bit-identical on all processors.

    Each value is the sum of two signed bytes divided by 1024, so float32 represents it exactly.
    """
    import torch

    drawn = bytearray(hashlib.shake_128(name.encode()).digest(2 * count))
    pairs = torch.frombuffer(drawn, dtype=torch.int8).view(count, 2)
    return pairs.sum(dim=1, dtype=torch.float32) / 1024
