"""Exports a checkpoint's model as .safetensors, .pt or a folder, and the final model at a run's end.

gridtrain export FOLDER OUT        FOLDER: one checkpoint, any folder above checkpoints, or their URL
                                   OUT:    .safetensors, or .pt/.pth for torch.load(weights_only=True),
                                           or a folder that `from_pretrained` of PEFT or transformers loads;
                                           may be a URL
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gridtrain.core.messages import LedgerState
from gridtrain.core.stages.repartition import uncovered_spans
from gridtrain.errors import ConfigError, RemoteProtocolError, disk_errors
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.checkpoint_store import (
    Checkpoint,
    checkpoint_step,
    earlier_folder,
    parse_step,
)
from gridtrain.training.checkpoint.flat_gradient import canonical_state
from gridtrain.training.checkpoint.frozen_base import is_base
from gridtrain.training.checkpoint.pretrained import (
    MAX_SHARD_BYTES,
    REPLACED_NAME,
    PretrainedLayout,
    unwritable,
    write_directory,
    write_safetensors,
)
from gridtrain.training.checkpoint.remote_store import RemoteStore, is_url, upload
from gridtrain.training.checkpoint.serialization import model_tensors
from gridtrain.training.checkpoint.stage_checkpoint_store import parse_stage_folder

log = logging.getLogger("gridtrain")

FINAL_FILE = "final.safetensors"
FINAL_INDEX = f"{FINAL_FILE}.index.json"
_FINAL_PART = re.compile(r"final-\d{5}-of-\d{5}\.safetensors")
END = "end"
"""The metadata key, in a stage's part of the final model and in its index, for the end of the run at which
they were written."""

MAX_DEPTH = 5  # run / checkpoints / coordinator / worker / step


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export: the checkpoint that was read, its step and data ledger, the numbers of
    tensors and elements that were written, and the names of an adapter's frozen tensors that are missing from
    the checkpoint."""

    source: Path | str
    step: int
    ledger: LedgerState
    tensors: int
    elements: int
    left_out: Sequence[str] = ()


def export_by_url(
    source: str, out: str, step: int | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ExportResult:
    """Export as `export_model` does; `source` and `out` may also be URLs.

    Files that are read from or written to a URL are first stored in a temporary folder.

    Raises:
        ConfigError: as `export_model` does, or if a URL cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="gridtrain-export-") as scratch:
        folder, target = Path(source), Path(out)
        if is_url(source):
            store, folder = RemoteStore(source), Path(scratch) / "checkpoints"
            if not store.fetch_latest(folder, step=step):
                raise ConfigError(
                    f"there is no complete checkpoint{'' if step is None else f' of step {step}'} at "
                    f"{store.shown}",
                    remedy="pass the URL that the run's workers used as --checkpoints",
                )
        if is_url(out):
            target = Path(scratch) / PurePosixPath(out).name
        done = export_model(folder, target, step, max_shard_bytes)
        if is_url(out):
            upload(target, out, REPLACED_NAME)
        return replace(done, source=f"{store.shown}, step {done.step}") if is_url(source) else done


def export_model(
    folder: Path, out: Path, step: int | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ExportResult:
    """Write to `out` the model of a checkpoint in or below `folder`: the latest, or the one of `step`.

    The file replaces `out` when it is complete.  A damaged checkpoint is skipped if another checkpoint can be
    read instead.

    Args:
        max_shard_bytes: if `out` is a folder, the maximum size of each file of a whole model.

    Raises:
        ConfigError: there is no readable checkpoint, `out` cannot be written, or `out` is a folder and the
            model is neither a PEFT nor a transformers model.
    """
    # "Qwen3-0.6B" is the name of a folder.
    write = _writer(out) if out.suffix[1:].isalpha() and not out.is_dir() else None
    found = _find_checkpoints(folder, step)
    first_error: ConfigError | None = None
    for path in found:
        try:
            read = checkpoint_store.read(path)
            tensors = model_tensors(read.document, read.tensors)
            tensors |= _load_other_stages(read, found)
        except RemoteProtocolError as error:
            first_error = ConfigError(
                f"the checkpoint {path} cannot be read: {error.reason}",
                remedy="choose another checkpoint with --step N, or use another worker's --state-dir",
            )
            continue
        except ConfigError as error:
            first_error = first_error or error
            continue
        if first_error is not None and checkpoint_step(found[0]) > read.step:
            log.warning("a later checkpoint is ignored: %s", first_error)
        written, left_out = list(tensors.values()), list[str]()
        if write is None:
            written, left_out = write_directory(_layout_of(read), tensors, out, max_shard_bytes)
        else:
            _write_atomically(tensors, out, write)
        elements = sum(tensor.numel() for tensor in written)
        return ExportResult(path, read.step, read.position.ledger, len(written), elements, left_out)
    assert first_error is not None
    raise first_error


def _layout_of(read: Checkpoint) -> PretrainedLayout:
    if read.pretrained is None:
        raise ConfigError(
            f"the checkpoint {read.path} has no configuration of a PEFT or transformers model",
            remedy="write a plain file: OUT.safetensors or OUT.pt",
        )
    try:
        return PretrainedLayout.from_json(read.pretrained)
    except ValueError as error:
        raise ConfigError(
            f"the checkpoint {read.path} cannot be read: {error}",
            remedy="write a plain file: OUT.safetensors",
        ) from None


def save_model(state: Mapping[str, Any], out: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the tensors of a `state_dict` as a .safetensors file; other values, such as modules' extra state,
    are left out.

    Args:
        metadata: the metadata of the file.

    Raises:
        ConfigError: `out` cannot be written.
    """
    tensors = {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
    _write_atomically(tensors, out, partial(write_safetensors, metadata=metadata))


def keep_earlier(folder: Path, *names: str) -> str:
    """Copy the files and folders with these names, which were written to `folder` at an earlier end of a run,
    to a folder `earlier-N` below it; return what to append to the message that says where the new model is.

    Model files are linked where possible, because an export replaces them and does not change them; other
    files, such as a tokenizer's, are copied.  All of them are kept: a run ends again only if its owner
    restarts it, and a model that was deleted here could be the only copy.

    Raises:
        ConfigError: they cannot be kept.
    """
    try:
        found = [name for name in names if _is_model(folder / name)]
        kept = earlier_folder(folder, lambda path: not any((path / name).exists() for name in found))
        for name in found:
            kept.mkdir(exist_ok=True)
            if (folder / name).is_dir():
                try:
                    shutil.copytree(folder / name, kept / name, copy_function=_keep_file)
                except OSError:  # the export is tried again
                    shutil.rmtree(kept / name, ignore_errors=True)
                    raise
            else:
                _keep_file(folder / name, kept / name)
    except OSError as error:
        raise unwritable(folder, error) from None
    return f"; the one that was there before is in {kept}" if found else ""


def keep_earlier_parts(folder: Path, end: str) -> str:
    """Move the parts and indexes in `folder` that were not written at the run's end `end` to new folders
    `earlier-N` below `folder`, one for each end; return what to append to the message that says where the new
    part is.

    As with `keep_earlier`, all are kept.

    Raises:
        ConfigError: they cannot be moved.
    """
    kept: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _parts(folder).keys() <= {end}:
            return ""
        with _locked(folder):  # other workers may write their parts to it at the same time
            for other, paths in sorted(_parts(folder).items()):
                if other == end:
                    continue
                names = {path.name for path in paths}
                kept.append(earlier_folder(folder, partial(_can_take, end=other, names=names)))
                kept[-1].mkdir(exist_ok=True)
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):  # moved by another worker, where locks fail
                        os.rename(path, kept[-1] / path.name)
    except OSError as error:
        raise unwritable(folder, error) from None
    return f"; the one that was there before is in {' and '.join(map(str, kept))}" if kept else ""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other worker is moving files in `folder`, and lock it.

    The lock is on a file, because NFS does not lock folders.
    """
    with open(folder / ".final.lock", "a", encoding="utf-8") as opened:
        with contextlib.suppress(OSError):  # not all file systems have locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _can_take(folder: Path, end: str, names: set[str]) -> bool:
    """Return whether `folder` does not exist, or contains only parts that were written at the run's end
    `end`, none of which has a name in `names`."""
    if not folder.exists():
        return True
    parts = _parts(folder)
    return parts.keys() == {end} and names.isdisjoint(path.name for path in parts[end])


_UNREADABLE = SafetensorError, FileNotFoundError, RuntimeError
"""Raised for a damaged part, or for one that another worker moves while it is being opened."""


def _parts(folder: Path) -> dict[str, list[Path]]:
    """Return the parts and the index of final models in `folder`, by the end at which they were written."""
    found: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        metadata: Mapping[str, Any] = {}
        if path.name == FINAL_INDEX:
            with contextlib.suppress(ValueError, KeyError, TypeError, FileNotFoundError):  # damaged, or moved
                metadata = dict(json.loads(path.read_bytes())["metadata"])
        elif _FINAL_PART.fullmatch(path.name):
            with contextlib.suppress(*_UNREADABLE), safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
        else:
            continue
        found.setdefault(str(metadata.get(END, "")), []).append(path)
    return found


def _is_model(path: Path) -> bool:
    """Return whether a path is a file, or a folder with a model's files, not only those of a tokenizer."""
    return path.is_file() or (
        path.is_dir() and any(REPLACED_NAME.fullmatch(each.name) for each in path.iterdir())
    )


def _keep_file(source: str | Path, target: str | Path) -> None:
    path, partial = Path(target), Path(f"{target}.partial")
    if path.suffix == ".safetensors":
        with contextlib.suppress(OSError):  # not all file systems have links
            os.link(source, path)
            return
    try:
        shutil.copy2(source, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def plain_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict`, excluding its base, under the plain model's names, even if the model
    is compiled or wrapped."""
    state = model.state_dict(keep_vars=True)
    return canonical_state({name: value for name, value in state.items() if not is_base(value)})


def _load_other_stages(read: Checkpoint, found: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors of the other stages' checkpoints of the same step and history; {} if `read` contains
    the whole model.

    Raises:
        ConfigError: a layer is missing, or another stage's checkpoint cannot be read.
        RemoteProtocolError: a tensor of another stage's checkpoint is missing.
    """
    count = int(dict(read.facts).get("blocks", "0"))
    here = parse_stage_folder(read.path.parent.name)
    tensors: dict[str, Tensor] = {}
    if not count or here is None:
        return tensors
    have = {here}
    for path in found:
        blocks = parse_stage_folder(path.parent.name)
        if path.name != read.path.name or blocks is None or blocks in have:
            continue
        other = checkpoint_store.read(path)
        if (other.position.history, other.facts) == (read.position.history, read.facts):
            tensors |= model_tensors(other.document, other.tensors)
            have.add(blocks)
    if missing := uncovered_spans(have, count):
        raise ConfigError(
            f"the checkpoints of step {read.step} do not contain all {count} layers of the model; the first "
            f"missing layer is {missing[0].start}",
            remedy="pass a folder that contains the state directories of all workers, or choose another "
            "--step",
        )
    return tensors


def _find_checkpoints(folder: Path, step: int | None) -> list[Path]:
    """Return the checkpoints in or below `folder` to try, latest first.

    Raises:
        ConfigError: there is no checkpoint, or none of `step`, or a folder cannot be read.
    """
    if parse_step(folder.name) is not None and (folder / "state.json").exists():
        candidates = [folder]
    else:
        candidates = _search_folders(folder, MAX_DEPTH)
    steps = {path: checkpoint_step(path) for path in candidates}
    if not steps:
        raise ConfigError(
            f"there is no checkpoint in {folder}",
            remedy="pass a worker's --state-dir; workers write a checkpoint every --checkpoint-every steps, "
            "or none if this option is 0",
        )
    if step is not None and step not in steps.values():
        known = ", ".join(map(str, sorted(set(steps.values()))))
        raise ConfigError(
            f"there is no checkpoint of step {step} in {folder}", remedy=f"use one of the steps {known}"
        )
    chosen = [path for path in steps if step is None or steps[path] == step]
    return sorted(chosen, key=lambda path: (-steps[path], str(path)))


def _search_folders(folder: Path, depth: int) -> list[Path]:
    with disk_errors(f"{folder} cannot be read", "pass a folder that contains checkpoints"):
        inside = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    whole = [path for path in inside if parse_step(path.name) is not None]
    deeper = [path for path in inside if path not in whole] if depth > 1 else []
    return whole + [path for below in deeper for path in _search_folders(below, depth - 1)]


Writer = Callable[[Mapping[str, Tensor], Path], None]


def _writer(out: Path) -> Writer:
    match out.suffix:
        case ".safetensors":
            return write_safetensors
        case ".pt" | ".pth":
            return _write_torch
    raise ConfigError(
        f"{out.name} does not have the suffix of a supported format",
        remedy="use the suffix .safetensors or .pt, or none for a folder",
    )


class _ErrorRecordingFile:
    """A file that records a write error, because torch reports an archive error instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = self.failed or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write_torch(tensors: Mapping[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        disk = _ErrorRecordingFile(file)
        try:
            torch.save(dict(tensors), cast(BinaryIO, disk))
        except RuntimeError:
            if disk.failed is not None:
                raise disk.failed from None
            raise


def _write_atomically(tensors: Mapping[str, Tensor], out: Path, write: Writer) -> None:
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        write(tensors, partial)
        checkpoint_store.sync_folder(partial)
        os.replace(partial, out)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:  # torch raises RuntimeError
        raise unwritable(out, error) from None
    finally:
        with contextlib.suppress(OSError):  # a read-only file system, which is the error above
            partial.unlink(missing_ok=True)
    if damaged := [name for name, tensor in tensors.items() if tensor.isnan().any()]:
        log.warning(
            "%d of the %d tensors in %s contain NaN, the first of them %r: check the run's loss, learning "
            "rate and data",
            *(len(damaged), len(tensors), out, damaged[0]),
        )
