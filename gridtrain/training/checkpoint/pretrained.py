"""Folders that `from_pretrained` of PEFT and transformers loads: their files, sizes and adapters.

    end of a run        model in memory --> its own save_pretrained --> directory
    checkpoint          model in memory --> describe --> state.json: configuration files, names of tensors
    gridtrain export    tensors and description of a checkpoint --> write_directory --> directory

    adapter             adapter_model.safetensors, adapter_config.json
    whole model         model.safetensors, or shards and model.safetensors.index.json; config.json

This module imports neither package: a package's models exist only in scripts that have imported it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from gridtrain.core.messages import Facts
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.flat_gradient import canonical_names, canonical_parameters, canonical_state

log = logging.getLogger("gridtrain")

MAX_SHARD_BYTES = 5_000_000_000
"""The default maximum size of each file of a whole model: transformers' default before version 5."""

ADAPTER_FILE, MODEL_FILE = "adapter_model.safetensors", "model.safetensors"
_METADATA = {"format": "pt"}  # transformers rejects a file without it
_PEFT_MODEL = ("peft.peft_model", "PeftModel")
_PLACE_OF_BASE = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
"""Settings of an adapter that may differ between workers."""
_TRANSFORMERS_MODEL = ("transformers.modeling_utils", "PreTrainedModel")
FINAL_FOLDERS = "final-model", "final-adapter"
REPLACED_NAME = re.compile(
    r"adapter_config\.json|adapter_model\.safetensors|model\.safetensors(\.index\.json)?"
    r"|model-\d{5}-of-\d{5}\.safetensors"
)
"""The names of the files that an export to the same folder replaces or removes."""

MAX_FILES, MAX_TEXT_BYTES = 64, 16 << 20
"""The maximum number of files that a description may name, and of bytes in each configuration file."""
MAX_COPIES = 4
"""The maximum number of names of a tensor in a file: PEFT writes a resized vocabulary's embedding twice."""

_TEXT_PATH = re.compile(r"[A-Za-z0-9_-]*config\.json|[\w -]{1,100}/adapter_config\.json")
_TENSORS_PATH = re.compile(rf"{re.escape(MODEL_FILE)}|([\w -]{{1,100}}/)?{re.escape(ADAPTER_FILE)}")
_ALLOWED = (
    f"allowed are names that end in config.json, {MODEL_FILE} and {ADAPTER_FILE}, and in an adapter's folder "
    f"adapter_config.json and {ADAPTER_FILE}"
)


@dataclass(frozen=True, slots=True)
class PretrainedLayout:
    """What must be added to a checkpoint's tensors to form a directory that `from_pretrained` loads.

    Attributes:
        texts: the contents of the configuration files, by path in the directory.
        names: for each file of tensors, a map from names in the file to names in the checkpoint.
    """

    texts: Mapping[str, str]
    names: Mapping[str, Mapping[str, str]]

    @property
    def is_adapter(self) -> bool:
        return MODEL_FILE not in self.names

    def to_json(self) -> dict[str, Any]:
        return {"texts": dict(self.texts), "names": {file: dict(names) for file, names in self.names.items()}}

    @classmethod
    def from_json(cls, node: Any) -> PretrainedLayout:
        """Parse the result of `to_json`, which may come from a damaged file or from a peer.

        Raises `ValueError` if it is malformed, or if `check` does.
        """
        try:
            texts = {str(path): str(text) for path, text in node["texts"].items()}
            names = {
                str(path): {str(name): str(stored) for name, stored in each.items()}
                for path, each in node["names"].items()
            }
        except (TypeError, KeyError, AttributeError):
            raise ValueError("its description of a pretrained model is malformed") from None
        layout = cls(texts, names)
        layout.check()
        return layout

    def check(self) -> None:
        """Raise `ValueError` if the layout names a file that the libraries do not write, too many files, or
        one tensor too often, or if a text is too long.

        A peer's checkpoint must not choose which files an export writes.
        """
        if problem := self._problem():
            raise ValueError(f"its description of a pretrained model {problem}")

    def _problem(self) -> str:
        allowed = [(path, _TEXT_PATH) for path in self.texts] + [(path, _TENSORS_PATH) for path in self.names]
        for path, pattern in allowed:
            if not pattern.fullmatch(path):
                return f"names the file {path[:200]!r}; {_ALLOWED}"
        if len(allowed) > MAX_FILES:
            return f"names {len(allowed)} files; at most {MAX_FILES} are allowed"
        try:
            sizes = {path: len(text.encode()) for path, text in self.texts.items()}
            for names in self.names.values():
                "".join(names).encode()
        except UnicodeEncodeError:
            return "is malformed"
        for path, names in self.names.items():
            for stored, copies in Counter(names.values()).most_common(1):
                if copies > MAX_COPIES:
                    tensor = f"the tensor {stored[:200]!r} in {path}"
                    return f"has {copies} names for {tensor}; at most {MAX_COPIES} are allowed"
        for path, size in sizes.items():
            if size > MAX_TEXT_BYTES:
                return f"has {size} bytes for {path}; at most {MAX_TEXT_BYTES} are allowed"
        return ""


def find_pretrained(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the outermost PEFT or transformers model in `model`, preceded by the prefix that the names of
    its tensors have there.

    This may be `model` itself, with the prefix "".  Returns None if there is no such model.
    """
    classes = _imported(*_PEFT_MODEL) + _imported(*_TRANSFORMERS_MODEL)
    for name, module in model.named_modules():
        if isinstance(module, classes):
            return f"{name}." if name else "", module
    return None


def is_adapter(pretrained: nn.Module) -> bool:
    """Whether `save_pretrained` of this model writes an adapter, as for a `PeftModel`, or for a
    transformers model after `add_adapter`."""
    return isinstance(pretrained, _imported(*_PEFT_MODEL)) or bool(
        getattr(pretrained, "_hf_peft_config_loaded", False)
    )


def _imported(module: str, name: str) -> tuple[type[nn.Module], ...]:
    """Return the class as a tuple for `isinstance`; the tuple is empty if the module is not imported."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def adapter_facts(model: nn.Module) -> Facts:
    """Return the fact that describes the adapters of a PEFT model, which must be equal on all workers.

    Other models have no such fact.  The fact covers what the parameters do not show, such as
    `lora_alpha`, but not where the base was loaded from, or options that have their default value: most
    versions of PEFT add some, and workers may have different versions.
    """
    found = find_pretrained(model)
    if found is None or not isinstance(found[1], _imported(*_PEFT_MODEL)):
        return ()
    described = []
    for name, config in sorted(found[1].peft_config.items()):  # type: ignore[union-attr, operator]
        values = config.to_dict()
        usual = {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(config)
        }
        chosen = {k: v for k, v in values.items() if k not in _PLACE_OF_BASE and v != usual.get(k)}
        text = json.dumps(chosen, sort_keys=True, default=_plain)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        shown = [f"{key}={values[key]}" for key in ("r", "lora_alpha") if values.get(key) is not None]
        described.append(" ".join([str(name), *shown, f"digest {digest}"]))
    return (("adapter", "; ".join(described)),)


def describe(model: nn.Module, trained: Iterable[Tensor]) -> PretrainedLayout | None:
    """Return the layout of the directory of `model`; None if it is not a PEFT or transformers model, if its
    library cannot save it in a permitted form, or if a parameter in `trained` would be missing.

    The names in an adapter's file are found by letting the library itself save one-element tensors that
    contain the positions of the tensors in the state_dict.
    """
    found = find_pretrained(model)
    if found is None:
        return None
    prefix, inner = found
    state = {
        name: value for name, value in inner.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }
    own, stored = canonical_names(list(state)), _stored_names(model, prefix, list(state))
    places = {name: torch.tensor([place]) for place, name in enumerate(own)} if is_adapter(inner) else {}
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        try:
            inner.save_pretrained(folder, state_dict=places)  # type: ignore[operator]
        except Exception as error:  # a configuration that the library cannot save must not end the training
            log.warning(
                "checkpoints of this %s can only be exported as .safetensors or .pt files: %s: %s",
                *(type(inner).__name__, type(error).__name__, error),
            )
            return None
        texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*config.json")}
        names = {
            str(path.relative_to(folder)): {
                name: stored[int(place)] for name, place in safetensors.torch.load_file(path).items()
            }
            for path in folder.rglob(ADAPTER_FILE)
        }
    if not places:
        first = {id(value): place for place, value in reversed(list(enumerate(state.values())))}
        # A tied tensor is written under its first name only.
        names = {MODEL_FILE: {own[place]: stored[place] for place in sorted(first.values())}}
    layout = PretrainedLayout(texts, names)
    try:
        layout.check()
    except ValueError as error:
        log.warning(
            "checkpoints of this %s can only be exported as .safetensors or .pt files: %s",
            type(inner).__name__,
            error,
        )
        return None
    if outside := _uncovered(model, layout, trained):
        log.warning(
            "the model can only be exported as a .safetensors or .pt file, because %s does not have %s, such "
            "as %r",
            *(type(inner).__name__, format_count(len(outside), "trained parameter"), outside[0]),
        )
        return None
    return layout


def _stored_names(model: nn.Module, prefix: str, names: list[str]) -> list[str]:
    """Return the names, in a checkpoint of `model`, of the tensors called `names` in a part of the model."""
    whole = list(model.state_dict(keep_vars=True))
    stored = dict(zip(whole, canonical_names(whole), strict=True))
    return [stored[prefix + name] for name in names]


def _uncovered(model: nn.Module, layout: PretrainedLayout, trained: Iterable[Tensor]) -> list[str]:
    """Return the names of the parameters in `trained` that no file of the directory contains."""
    named = canonical_state(model.state_dict(keep_vars=True))
    covered = {id(named[name]) for names in layout.names.values() for name in names.values()}
    outside = {id(parameter) for parameter in trained} - covered
    return [name for name, parameter in canonical_parameters(model) if id(parameter) in outside]


def export_final(model: nn.Module, layout: PretrainedLayout, folder: Path) -> Path | None:
    """Write the directory of a trained model to `folder`; return its path, or None if the library fails.

    Raises:
        ConfigError: `folder` cannot be written.
    """
    path = folder / FINAL_FOLDERS[layout.is_adapter]
    try:
        save_directory(model, path)
    except ConfigError:
        raise
    except Exception as error:  # the trained model must not be lost
        log.warning("%s cannot be written: %s: %s", path, type(error).__name__, error)
        return None
    return path


def save_directory(model: nn.Module, folder: Path) -> None:
    """Write the PEFT or transformers model in `model` with its own `save_pretrained`.

    Raises:
        ConfigError: `folder` cannot be written.
    """
    found = find_pretrained(model)
    assert found is not None
    _, inner = found
    state = canonical_state(inner.state_dict())
    options: dict[str, Any] = {} if is_adapter(inner) else {"max_shard_size": MAX_SHARD_BYTES}

    def write(partial: Path) -> None:
        inner.save_pretrained(partial, state_dict=state, **options)  # type: ignore[operator]

    _publish(folder, write)


def write_directory(
    layout: PretrainedLayout,
    tensors: Mapping[str, Tensor],
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[list[Tensor], list[str]]:
    """Write the directory from the tensors of a checkpoint; return the tensors that were written, and the
    names (in checkpoints) of the adapter's tensors that the checkpoint lacks.

    Frozen tensors may be missing from an adapter, because they belong to its base: PEFT itself adds the
    base's embedding to an adapter if the vocabulary was resized.

    Raises:
        ConfigError: a tensor of a whole model is missing, or `folder` cannot be written.
    """
    wanted = [stored for names in layout.names.values() for stored in names.values()]
    left_out = [stored for stored in wanted if stored not in tensors]
    if left_out and (not layout.is_adapter or len(left_out) == len(wanted)):
        raise ConfigError(
            f"the checkpoint does not have {len(left_out)} of {len(wanted)} tensors, such as {left_out[0]!r}",
            remedy="write the tensors that it has to a file: OUT.safetensors",
        )
    files = {
        file: {name: tensors[stored] for name, stored in names.items() if stored in tensors}
        for file, names in layout.names.items()
    }

    def write(partial: Path) -> None:
        for path, text in layout.texts.items():
            _write_text(partial / path, text)
        for path, held in files.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            if path == MODEL_FILE:
                _write_shards(held, partial, max_shard_bytes)
            else:
                write_safetensors(held, partial / path, _METADATA)

    _publish(folder, write)
    return [tensor for held in files.values() for tensor in held.values()], left_out


def _write_shards(tensors: Mapping[str, Tensor], folder: Path, max_bytes: int) -> None:
    """Write model.safetensors, or, if it would be larger than `max_bytes`, shards with an index."""
    shards = list(_split(tensors, max_bytes))
    if len(shards) == 1:
        write_safetensors(tensors, folder / MODEL_FILE, _METADATA)
        return
    stem, suffix = MODEL_FILE.split(".")
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        write_safetensors(shard, path, _METADATA)
        index |= dict.fromkeys(shard, path.name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    body = {"metadata": {"total_size": total_bytes}, "weight_map": index}
    _write_text(folder / f"{MODEL_FILE}.index.json", json.dumps(body, indent=2))


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, in parts of at most `max_bytes`; a larger tensor is a part of its own."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(held.nbytes for held in part.values()) + tensor.nbytes > max_bytes:
            yield part
            part = {}
        part[name] = tensor
    yield part


def write_safetensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write copies of the tensors, because safetensors accepts neither shared memory (tied tensors have
    several names) nor non-contiguous tensors (channels_last)."""
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    safetensors.torch.save_file(own, path, metadata=metadata)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, and move its files to `folder` when all are complete.

    Other files in `folder`, such as a tokenizer's, stay.  Files that an earlier export wrote and this one did
    not write are removed at the end, so that a failure loses no tensors.

    Raises:
        ConfigError: `folder` cannot be written.
    """
    target = folder.resolve()  # "." has no name
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        write(partial)
        written = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        for path in written:
            checkpoint_store.sync_folder(partial / path)
        target.mkdir(exist_ok=True)
        for path in sorted(written, key=lambda path: path.suffix == ".json"):  # tensors first
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / path, target / path)
        for path in target.iterdir():
            if REPLACED_NAME.fullmatch(path.name) and Path(path.name) not in written:
                path.unlink()
    except (OSError, safetensors.SafetensorError) as error:
        raise unwritable(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def unwritable(path: Path, error: Exception) -> ConfigError:
    """Return the error that says why `path` cannot be written, and what the user can do about it."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path} cannot be written: {text}", remedy=_remedy(error))


def _remedy(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := re.search(r"\bos error (\d+)", str(error))):  # safetensors' wording
        number = int(found[1])
    match number:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "free space on that disk, or choose another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "choose a folder that you may write to"
        case errno.ENOENT:
            return "create the folder above it, or choose another folder"
    return "choose another folder"
