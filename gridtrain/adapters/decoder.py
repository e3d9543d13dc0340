"""Divides language models from transformers (GPT-2, Llama, ...), also with LoRA, into blocks for pipelines.

    pipe = grid.pipeline(decoder_blueprint(config), adamw, stages=4, loss_fn=next_token_loss)

    LlamaForCausalLM       blocks                            value between two blocks
    model.embed_tokens     model.embed_tokens                hidden states (B, T, H), or
    model.layers           model.layers.0, ..1, ..           {"hidden_states": .., "attention_mask": ..}
    model.rotary_emb       recomputed in each layer
    model.norm, lm_head    model.norm, lm_head               the output: logits (B, T, V)

The blocks are the model's own modules under their own names, so that the names in a state are those of the
whole model.  Each layer computes its attention mask and rotary embeddings itself, so these are not sent
between stages.  B is the number of samples, T the number of tokens in each, H the size of a hidden state, and
V the size of the vocabulary.

With `lora=`, the base is frozen, and each worker holds the part of it that belongs to its own layers.
Checkpoints of all stages are exported as a folder that `from_pretrained` of PEFT or transformers can load.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from gridtrain.errors import ConfigError, describe_type
from gridtrain.pipeline.blueprint import Blueprint, Init, find_tied_parameters
from gridtrain.pipeline.model_blocks import blocks_of
from gridtrain.pipeline.random_seeds import derive_initial_seed
from gridtrain.training.checkpoint import pretrained

if TYPE_CHECKING:
    from peft import LoraConfig

MODEL_TYPES = ("gemma", "gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The values of `model_type` for which the chain of blocks is known to compute the model's own result."""

_LORA_SETTINGS = {
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "bias"),
    *("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"),
}
"""Settings of a `LoraConfig` for which a chain of blocks computes the same result as PEFT's model."""

_ADAPTER_CONFIG = "adapter_config.json"
_INPUTS = ("input_ids", "attention_mask", "position_ids")
_HIDDEN = "hidden_states"


def decoder_blocks(model: PreTrainedModel) -> nn.Sequential:
    """Return a chain of blocks that computes the model's logits, bit for bit, with the model's parameters.

    Its input is the token ids, (B, T) int64, or a dict with `input_ids` and, if samples are padded or packed,
    `attention_mask` and `position_ids`, each (B, T).  The model itself is not changed.

    Raises:
        ConfigError: the model is not one of `MODEL_TYPES` with a language modeling head, or transformers is
            older than version 5.
    """
    config = getattr(model, "config", None)
    head, base = getattr(model, "lm_head", None), getattr(model, "base_model", None)
    if getattr(config, "model_type", None) not in MODEL_TYPES or head is None or base is model:
        raise ConfigError(
            f"{describe_type(model)} is not known to be a chain of decoder layers",
            remedy=f"use a ...ForCausalLM whose model_type is one of {', '.join(MODEL_TYPES)}; write another "
            "model as a gridtrain.pipeline.Sequence of its parts",
        )
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ConfigError(
            f"transformers {transformers.__version__} is not supported; it computes masks differently",
            remedy="install transformers 5 or newer",
        )
    names = (
        ("wte", "wpe", "drop", "h", "ln_f") if hasattr(base, "wpe") else ("embed_tokens", "layers", "norm")
    )
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name in names:
        part = getattr(base, name)
        if isinstance(part, nn.ModuleList):
            positions = LayerPositions(config, getattr(base, "rotary_emb", None))
            layers = [_block(_Layer, layer) for layer in part]
            for number, layer in enumerate(layers):
                layer.positions, layer.number = positions, number
            parts[name] = nn.Sequential(*layers)
        else:
            parts[name] = _block(_KINDS.get(name, _Plain), part)
    return nn.Sequential(
        OrderedDict({model.base_model_prefix: nn.Sequential(parts), "lm_head": _block(_Head, head)})
    )


def decoder_blueprint(
    source: PretrainedConfig | str | Path, *, seed: int = 0, lora: LoraConfig | None = None
) -> Blueprint:
    """Return the blueprint of a language model; each worker builds only its own stage.

    Args:
        source: the model's configuration, to draw initial values as transformers does; or a pretrained
            model's folder, from whose safetensors files each worker reads its blocks' values.
        seed: the seed of the run's initial values.
        lora: PEFT's configuration of the adapters that are trained instead of the model.

    Raises:
        ConfigError: the folder contains no pretrained model, or the model or `lora` cannot be used; see
            `decoder_blocks`.
    """
    folder = None if isinstance(source, PretrainedConfig) else Path(source)
    if folder is not None and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is not the folder of a pretrained model: it has no config.json",
            remedy="pass a folder that save_pretrained or `hf download` has written",
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            source if folder is None else AutoConfig.from_pretrained(folder)
        )
        whole = model if lora is None else _add_adapters(model, lora)
    chain = decoder_blocks(model)
    init = _draw_values(model) if folder is None else _read_values(folder, model, blocks_of(chain))
    init = init if lora is None else _with_adapters(init, seed, lora)
    return Blueprint(
        chain,
        seed=seed,
        init=init,
        reset=folder is None,
        pretrained=_describe(whole, model),
        facts=pretrained.adapter_facts(whole),
    )


def _add_adapters(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Freeze the model and add adapters to its layers; return PEFT's model around it."""
    import peft

    if not isinstance(lora, peft.LoraConfig):
        raise ConfigError(f"lora is {describe_type(lora)}", remedy="pass a peft.LoraConfig")
    plain = peft.LoraConfig(task_type="CAUSAL_LM")
    given = {field.name for field in fields(lora) if getattr(lora, field.name) != getattr(plain, field.name)}
    given -= {"task_type"} if lora.task_type is None else set()
    if refused := sorted(given - _LORA_SETTINGS):
        raise ConfigError(
            f"lora sets {', '.join(refused)}, which a model in stages cannot use",
            remedy=f"set only {', '.join(sorted(_LORA_SETTINGS))}",
        )
    try:
        whole: nn.Module = peft.get_peft_model(model, lora)
    except ValueError as error:  # such as a name that no layer has
        raise ConfigError(f"the adapters cannot be added: {error}", remedy="change target_modules") from None
    return whole


def _describe(whole: nn.Module, model: PreTrainedModel) -> Any:
    """Return, as JSON, the layout of the export of `whole`, which contains `model`; None if it cannot be
    exported in the format of PEFT or transformers."""
    layout = pretrained.describe(whole, [p for p in whole.parameters() if p.requires_grad])
    if layout is None:
        return None
    prefix = next(f"{name}." for name, module in whole.named_modules() if module is model).lstrip(".")
    names = {
        file: {name: stored.removeprefix(prefix) for name, stored in each.items()}
        for file, each in layout.names.items()
    }
    texts = dict(layout.texts)
    if (text := texts.get(_ADAPTER_CONFIG)) is not None:  # checkpoints, sent to others, contain no paths
        texts[_ADAPTER_CONFIG] = json.dumps({**json.loads(text), "base_model_name_or_path": None}, indent=2)
    return replace(layout, texts=texts, names=names).to_json()


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of all tokens except the first of each sample; targets of -100 are
    ignored."""
    return nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), ignore_index=-100
    )


# -- blocks ----------------------------------------------------------------------------------------


class LayerPositions:
    """Computes what a layer needs besides the hidden states: the attention mask and the rotary embeddings.

    Args:
        rotary: the model's module for rotary embeddings, or None.  Its buffers are not in any state, so the
            module is created again if they are not on the device of the hidden states.
    """

    def __init__(self, config: PretrainedConfig, rotary: nn.Module | None) -> None:
        self._config, self._rotary = config, rotary

    def arguments(self, number: int, hidden_BTH: Tensor, others: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the keyword arguments of layer `number`, as the model's own `forward` passes them."""
        positions = _positions(hidden_BTH, others)
        arguments: dict[str, Any] = {"position_ids": positions, "use_cache": False, "attention_mask": None}
        if not hidden_BTH.is_meta:  # on the meta device only shapes matter, and a mask needs values
            mask = create_masks_for_generate(
                self._config, hidden_BTH, others.get("attention_mask"), None, positions
            )
            is_by_type = isinstance(mask, dict)
            arguments["attention_mask"] = mask[self._config.layer_types[number]] if is_by_type else mask
        if self._rotary is not None:
            arguments["position_embeddings"] = self._rotary_at(hidden_BTH.device)(hidden_BTH, positions)
        return arguments

    def _rotary_at(self, device: torch.device) -> nn.Module:
        assert self._rotary is not None
        if next(self._rotary.buffers()).device != device:
            with torch.device("cpu"):
                self._rotary = type(self._rotary)(self._config).to(device)
        return self._rotary


def _positions(hidden_BTH: Tensor, others: Mapping[str, Tensor]) -> Tensor:
    if "position_ids" in others:
        return others["position_ids"]
    return torch.arange(hidden_BTH.shape[1], device=hidden_BTH.device).unsqueeze(0)


class _Plain(nn.Module):
    """A block that changes the hidden states, and returns the attention mask and positions unchanged.

    The class of each block is derived from this class or from one of its subclasses below, and from the class
    of the model's own module.
    """

    def forward(self, x: Any) -> Any:
        hidden, others = (x, {}) if isinstance(x, Tensor) else (x[_HIDDEN], x)
        hidden = self._change(hidden, others)
        return {**others, _HIDDEN: hidden} if others else hidden

    def _change(self, hidden: Tensor, others: Mapping[str, Tensor]) -> Tensor:
        return super().forward(hidden)  # type: ignore[no-any-return]


class _Tokens(_Plain):
    """The embedding of the tokens."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return super().forward(x)
        if not isinstance(x, Mapping) or not {"input_ids"} <= x.keys() <= set(_INPUTS):
            given = ", ".join(map(str, x)) if isinstance(x, Mapping) else type(x).__name__
            raise ConfigError(
                f"the model cannot use an input of {given}",
                remedy=f"pass the token ids, or a dict of {', '.join(_INPUTS)}; labels are the targets",
            )
        others = {name: x[name] for name in _INPUTS[1:] if name in x}
        return super().forward({**others, _HIDDEN: x["input_ids"]} if others else x["input_ids"])


class _Positions(_Plain):
    """Adds GPT-2's embedding of the positions to the embedding of the tokens."""

    def _change(self, hidden: Tensor, others: Mapping[str, Tensor]) -> Tensor:
        return hidden + super()._change(_positions(hidden, others), {})


class _Layer(_Plain):
    """A decoder layer."""

    positions: LayerPositions
    number: int

    def _change(self, hidden: Tensor, others: Mapping[str, Tensor]) -> Tensor:
        arguments = self.positions.arguments(self.number, hidden, others)
        return super(_Plain, self).forward(hidden, **arguments)  # type: ignore[no-any-return]


class _Head(_Plain):
    """The language modeling head, whose result is the logits alone."""

    def forward(self, x: Any) -> Any:
        return super().forward(x if isinstance(x, Tensor) else x[_HIDDEN])


_KINDS: dict[str, type[_Plain]] = {"embed_tokens": _Tokens, "wte": _Tokens, "wpe": _Positions}


def _block(kind: type[_Plain], module: nn.Module) -> Any:
    """Return a module of the given kind that shares parameters, buffers and children with `module`."""
    block: Any = object.__new__(type(f"{kind.__name__}{type(module).__name__}", (kind, type(module)), {}))
    vars(block).update(vars(module))
    for held in ("_parameters", "_buffers", "_modules"):
        vars(block)[held] = dict(vars(module)[held])
    return block


# -- initial values --------------------------------------------------------------------------------


def _draw_values(model: PreTrainedModel) -> Init:
    """Return a function that initializes a block as the model's class does, with random values."""

    @torch.no_grad()
    def init(block: nn.Module, number: int) -> None:
        for child in block.children():
            init(child, number)
        model._init_weights(block)

    return init


def _with_adapters(base: Init, seed: int, lora: LoraConfig) -> Init:
    """Return a function that initializes a block with `base`, and then the block's adapters.

    Each adapter has a seed of its own, because the number of random values drawn earlier depends on the
    base's files and on library versions.
    """

    @torch.no_grad()
    def init(block: nn.Module, number: int) -> None:
        base(block, number)
        for path, module in block.named_modules():
            reset: Any = getattr(module, "reset_lora_parameters", None)
            if reset is not None:
                torch.default_generator.manual_seed(derive_initial_seed(seed, number, path))
                for name in (*module.lora_A, *module.lora_embedding_A):
                    reset(name, lora.init_lora_weights)

    return init


def _read_values(folder: Path, model: PreTrainedModel, blocks: Mapping[str, nn.Module]) -> Init:
    """Return a function that reads a block's values from the model's safetensors files."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = dict(json.loads(index.read_text())["weight_map"])
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                files = dict.fromkeys(file.keys(), "model.safetensors")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"the tensors in {folder} cannot be read: {error}",
            remedy="the folder must contain model.safetensors, or its index and all files in the index",
        ) from error
    names, prefix = tuple(blocks), f"{model.base_model_prefix}."
    tied = {place for each in find_tied_parameters(tuple(blocks.values())) for place in each.places[1:]}

    @torch.no_grad()
    def init(block: nn.Module, number: int) -> None:
        tensors: dict[str, Any] = dict(block.named_parameters()) | dict(block.named_buffers())
        stored: dict[str, str] = {}
        for name in block.state_dict():
            full = f"{names[number]}.{name}".replace(".base_layer.", ".")
            found = full if full in files else full.removeprefix(prefix)  # GPT-2's files have no prefix
            if found in files:
                stored[name] = found
                tensors[name]._is_hf_initialized = True  # so that no value is drawn for it
            elif "lora_" not in name and (number, name) not in tied:  # tied values belong to earlier blocks
                raise ConfigError(f"{folder} has no tensor {full!r}", remedy="download all of its files")
        _draw_values(model)(block, number)  # for buffers that are not in any file
        for name, found in stored.items():
            with safe_open(folder / files[found], "pt") as file:
                value = file.get_tensor(found)
            if value.shape != tensors[name].shape:
                raise ConfigError(
                    f"{found!r} has the shape {tuple(value.shape)} in {folder}, but "
                    f"{tuple(tensors[name].shape)} in the model",
                    remedy="use the config.json that belongs to the files",
                )
            tensors[name].copy_(value)

    return init
