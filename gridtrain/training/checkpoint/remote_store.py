"""Checkpoints at a URL (`s3://bucket/run`, through fsspec): manifests, download, retries and removal.

    URL/step-00000200/model.json             the manifest: position, settings, size and SHA-256 of each file
                      4f1c....json           state.json and tensors.safetensors, named by their digests
                      9ab2....safetensors
    URL/step-00000200/blocks-000-003.json    a manifest of each stage of a pipeline, in the same way

A manifest is written after its files and removed before them, so that a checkpoint counts only while all its
files exist; a pipeline's checkpoint counts if the manifests of one history cover all layers.  Because files
are named by their contents, two workers, or two attempts, that write the same checkpoint cannot damage it.
Residuals are not uploaded, because they contain traces of a worker's samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gridtrain.core.messages import Facts
from gridtrain.core.stages.repartition import uncovered_spans
from gridtrain.errors import ConfigError
from gridtrain.extras import install_command, require
from gridtrain.quantities import make_printable
from gridtrain.runtime.state_transfer.checkpoint_copy import FILES
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.stage_checkpoint_store import parse_stage_folder

log = logging.getLogger("gridtrain")

T = TypeVar("T")

FORMAT = 1
MODEL_PART = "model"
"""The name of the part with the whole model; the part of a stage has the name of its folder on disk."""

MAX_MANIFEST_BYTES = 1 << 20
MAX_INCOMPLETE = 4
"""The number of incomplete checkpoints to keep, which other workers may still be uploading."""

CHECK_TIMEOUT_S = 60.0
"""The time within which the storage must answer before a run begins."""

FETCH_RETRY_AFTER_S = (1.0, 5.0, 25.0)
"""The seconds to wait before each further attempt at fetching a checkpoint."""

_MANIFEST = re.compile(r"(model|blocks-\d{3,}-\d{3,})\.json")
_FILE = re.compile(r"[0-9a-f]{64}\.(json|safetensors)")
_OLDER_IS_USED = "no action is needed if an older checkpoint can be used"
_REMEDY = "check the URL, the network and the credentials; see docs/operations.md"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint: its name in the checkpoint's folder on disk, its size and its digest."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.name, path.stat().st_size, sha256)

    @property
    def stored_name(self) -> str:
        return self.sha256 + Path(self.name).suffix


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a part of a checkpoint: the whole model, or a stage.

    Attributes:
        history: the chained digest of all applied updates, in hexadecimal.
        part: `MODEL_PART`, or the name of the stage's folder.
        worker: an identifier of the worker that uploaded it.
        facts: the training settings.
    """

    step: int
    history: str
    part: str
    worker: str
    facts: Facts
    files: tuple[StoredFile, ...]

    def to_json(self) -> bytes:
        body = {
            "format": FORMAT,
            "step": self.step,
            "history": self.history,
            "worker": self.worker,
            "facts": [list(fact) for fact in self.facts],
            "files": {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in self.files},
        }
        return json.dumps(body, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, step: int, part: str) -> Manifest:
        """Parse a manifest.  Raises `ValueError`, `TypeError` or `KeyError` if it is malformed."""
        body = json.loads(data)
        if (body["format"], body["step"]) != (FORMAT, step):
            raise ValueError(f"its format and step are {body['format']!r} and {body['step']!r}")
        files = tuple(
            StoredFile(name, int(f["bytes"]), str(f["sha256"])) for name, f in body["files"].items()
        )
        if sorted(file.name for file in files) != sorted(FILES):
            raise ValueError(f"it names the files {[file.name for file in files]}")
        if not all(_FILE.fullmatch(file.stored_name) for file in files):
            raise ValueError("a digest is malformed")
        facts = checkpoint_store.parse_facts(body["facts"])
        return cls(step, str(body["history"]), part, str(body["worker"]), facts, files)


def is_url(place: str) -> bool:
    return "://" in place


def shown_url(url: str) -> str:
    """Return the URL for messages: without a query, and without a user name that has a password or could be
    a token.  (In abfs://container@account the part before @ is not a user name.)"""
    text = re.sub(r"://[^/@:]*:.*@", "://", url).partition("?")[0]
    return re.sub(r"^(https?|s?ftp)://[^/]*@", r"\1://", text)


def open_url(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises:
        ConfigError: `url` is not a URL or is an HTTP URL, or a package for its protocol is not installed.
    """
    if not is_url(url):
        raise ConfigError(
            f"{url!r} is not a URL", remedy="write a URL, such as s3://bucket/run or file:///mnt/nas/run"
        )
    if url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{shown_url(url)} cannot be used: files can neither be written nor removed over HTTP",
            remedy="write the URL of an object store or a folder, such as s3://bucket/run or file:///mnt/nas/run",
        )
    require("fsspec", shown_url(url))
    import fsspec

    options = {"auto_mkdir": True} if url.startswith("file:") else {}
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        fix = install_command("remote") if url.startswith("s3") else "install the package that it requires"
        raise ConfigError(f"{shown_url(url)} cannot be used: {error}", remedy=fix) from None
    except Exception as error:  # an unknown protocol, or settings that the package of the protocol refuses
        raise _unusable_error(url, error) from None
    return found


def _unusable_error(url: str, error: Exception) -> ConfigError:
    return ConfigError(f"{shown_url(url)} cannot be used: {_describe(error)}", remedy=_REMEDY)


def _describe(error: Exception) -> str:
    return make_printable(f"{type(error).__name__}: {error}")


def upload(path: Path, url: str, replaced: re.Pattern[str]) -> None:
    """Copy a file, or a folder of files, to a URL.

    JSON files are removed first and copied last, so that a folder with only some of its tensors is not
    loaded.  Files of an earlier export whose names match `replaced` are removed unless they are replaced.

    Raises:
        ConfigError: `url` is not a URL, or cannot be written to.
    """
    files, root = open_url(url.rstrip("/"))
    from fsspec.implementations.local import LocalFileSystem

    try:
        if path.is_file():
            is_local = isinstance(files, LocalFileSystem)  # object stores replace a file atomically
            target = f"{root}.partial" if is_local else root
            files.put_file(str(path), target)
            if is_local:
                os.replace(target, root)
            return
        written = [each for each in path.rglob("*") if each.is_file()]
        old = [name for name in _names(files, root) if replaced.fullmatch(name) or (path / name).exists()]
        for name in old:
            if name.endswith(".json"):
                files.rm_file(f"{root}/{name}")
        for each in sorted(written, key=lambda each: each.suffix == ".json"):
            files.put_file(str(each), f"{root}/{each.relative_to(path)}")
        for name in old:
            if not (name.endswith(".json") or (path / name).exists()):
                files.rm_file(f"{root}/{name}")
    except Exception as error:  # of the library that fsspec uses
        raise _unusable_error(url, error) from None


def _names(files: Any, path: str) -> list[str]:
    """Return the names in a folder; [] if it does not exist."""
    files.invalidate_cache()
    try:
        return [str(each).rstrip("/").rpartition("/")[2] for each in files.ls(path, detail=False)]
    except FileNotFoundError:
        return []


class RemoteStore:
    """The checkpoints below a URL.

    Unless stated otherwise, the methods raise errors of any class, from the libraries that fsspec uses.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.shown = shown_url(self._url)
        self._files, root = open_url(self._url)
        self._root = root.rstrip("/")

    # -- before the first step ---------------------------------------------------------------------------

    def check(self, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """Check that the storage can be used: write, read and remove a small file.

        Raises:
            ConfigError: one of these operations fails, or they take longer than `timeout_s`.
        """
        path, token = f"{self._root}/check-{secrets.token_hex(8)}", secrets.token_bytes(16)

        def write_and_read() -> None:
            self._files.pipe_file(path, token)
            if self._files.cat_file(path) != token:
                raise OSError(f"{path} does not contain what was written")
            self._files.rm_file(path)

        failures: list[Exception] = []
        checking = threading.Thread(target=_collect_errors, args=(write_and_read, failures), daemon=True)
        checking.start()
        checking.join(timeout_s)
        if checking.is_alive():
            failures.append(TimeoutError(f"it has not answered within {timeout_s:g} s"))
        if failures:
            raise _unusable_error(self._url, failures[0])

    # -- what is there -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, including incomplete ones, latest first."""
        found = map(checkpoint_store.parse_step, _names(self._files, self._root))
        return sorted((step for step in found if step is not None), reverse=True)

    def manifests(self, step: int) -> list[Manifest]:
        """Return the readable manifests of a step."""
        found = []
        for name in _names(self._files, self._folder(step)):
            if _MANIFEST.fullmatch(name):
                try:
                    data = self._files.cat_file(f"{self._folder(step)}/{name}", end=MAX_MANIFEST_BYTES)
                    found.append(Manifest.from_json(data, step, name.removesuffix(".json")))
                except FileNotFoundError:
                    continue  # removed by another worker
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    log.warning("%s/%s of step %d will not be used: %s", self.shown, name, step, error)
        return found

    def complete(self, step: int) -> list[Manifest]:
        """Return the manifests of a complete checkpoint; [] if the checkpoint of this step is incomplete."""
        found = self.manifests(step)
        for first in found:
            own = [each for each in found if (each.history, each.facts) == (first.history, first.facts)]
            spans = {span for each in own if (span := parse_stage_folder(each.part)) is not None}
            blocks = int(dict(first.facts).get("blocks", "0"))
            is_whole = any(each.part == MODEL_PART for each in own)
            if is_whole or (blocks and not uncovered_spans(spans, blocks)):
                return own
        return []

    def complete_checkpoints(self) -> Iterator[list[Manifest]]:
        """Yield the manifests of each complete checkpoint, latest first."""
        return (found for step in self.steps() if (found := self.complete(step)))

    def _folder(self, step: int) -> str:
        return f"{self._root}/{checkpoint_store.checkpoint_folder_name(step)}"

    # -- writing and removing ----------------------------------------------------------------------------

    def put(self, folder: Path, part: str, worker: str) -> None:
        """Upload a checkpoint from disk, its manifest last."""
        position, facts = checkpoint_store.read_header(folder)
        step, files = position.applied + 1, []
        self._files.makedirs(self._folder(step), exist_ok=True)
        for name in FILES:
            path = folder / name
            stored = StoredFile.of(path)
            target = f"{self._folder(step)}/{stored.stored_name}"
            if self._size(target) != stored.bytes:
                self._files.put_file(str(path), target)
                if (size := self._size(target)) != stored.bytes:
                    raise OSError(f"{target} is {size} bytes long; {stored.bytes} were written")
            files.append(stored)
        manifest = Manifest(step, position.history.hex(), part, worker, facts, tuple(files))
        self._files.pipe_file(f"{self._folder(step)}/{part}.json", manifest.to_json())

    def _size(self, path: str) -> int | None:
        self._files.invalidate_cache()
        try:
            return int(self._files.info(path)["size"])
        except FileNotFoundError:
            return None

    def prune(self, keep: int) -> None:
        """Remove the checkpoints that are older than the latest `keep` complete ones, and the incomplete ones
        that are not among the latest `MAX_INCOMPLETE` incomplete ones."""
        counts: Counter[bool] = Counter()
        for step in self.steps():
            is_complete = bool(self.complete(step))
            counts[is_complete] += 1
            is_old = counts[True] >= keep or counts[False] > MAX_INCOMPLETE
            if counts[True] > keep if is_complete else is_old:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, its manifests first; files that do not belong to a checkpoint are kept."""
        names = [
            name
            for name in _names(self._files, self._folder(step))
            if _MANIFEST.fullmatch(name) or _FILE.fullmatch(name)
        ]
        for name in sorted(names, key=lambda name: _MANIFEST.fullmatch(name) is None):
            with contextlib.suppress(FileNotFoundError):  # another worker may also remove it
                self._files.rm_file(f"{self._folder(step)}/{name}")
        with contextlib.suppress(Exception):  # object stores have no folders, and raise various errors
            self._files.rmdir(self._folder(step))

    # -- reading -----------------------------------------------------------------------------------------

    def fetch_latest(
        self,
        folder: Path,
        facts: Facts | None = None,
        newer_than: int = 0,
        step: int | None = None,
    ) -> int:
        """Copy the latest complete checkpoint or the one of `step` to `folder`, in the layout of a worker's
        disk.  A damaged one is skipped with a warning if an older one can be used.

        Args:
            facts: the training settings that the checkpoint must have; None for any.
            newer_than: the step of the latest complete checkpoint on disk; only a later one is copied.

        Returns:
            the checkpoint's step, even if the checkpoint was not copied; 0 if there is none.

        Raises:
            ConfigError: the checkpoint has different settings, or no checkpoint can be read.
        """
        first_error: ConfigError | None = None
        try:
            for manifests in self._retried(lambda: list(self.complete_checkpoints())):
                found = manifests[0].step
                if step is not None and found != step:
                    continue
                self._check_facts(manifests[0], facts)
                if found <= newer_than:
                    return found
                log.warning("fetching the checkpoint of step %d from %s", found, self.shown)
                try:
                    for manifest in manifests:
                        self._fetch(manifest, folder, facts or manifest.facts)
                    return found
                except ConfigError as error:
                    log.warning(
                        "the checkpoint of step %d in %s will not be used: %s", found, self.shown, error
                    )
                    first_error = first_error or error
        except ConfigError:
            raise
        except Exception as error:
            raise _unusable_error(self._url, error) from None
        if first_error is not None:
            raise ConfigError(
                f"no checkpoint in {self.shown} can be used: {first_error.reason}",
                remedy="to begin at step 0, choose another URL",
            )
        return 0

    def _check_facts(self, manifest: Manifest, facts: Facts | None) -> None:
        if facts is None or checkpoint_store.matches_facts(manifest.facts, facts):
            return
        other = checkpoint_store.describe_difference(manifest.facts, facts)
        raise ConfigError(
            f"{self.shown} has a checkpoint of step {manifest.step} with different training settings "
            f"({other})",
            remedy="choose another URL for each run",
        )

    def _fetch(self, manifest: Manifest, folder: Path, facts: Facts) -> None:
        """Copy a part, unless it is on disk with the same history and settings.  Raises `ConfigError` if the
        part is missing or damaged."""
        parent = folder if manifest.part == MODEL_PART else folder / manifest.part
        path = checkpoint_store.step_folder(parent, manifest.step)
        with contextlib.suppress(ConfigError):  # the disk has none, or a damaged one
            found = checkpoint_store.read(path)
            is_same = found.position.history.hex() == manifest.history
            if is_same and checkpoint_store.matches_facts(found.facts, facts):
                return  # a copy would not have its residual
        with checkpoint_store.replaced_folder(path) as copy:
            for file in manifest.files:
                source = f"{self._folder(manifest.step)}/{file.stored_name}"
                self._retried(partial(self._get, source, copy / file.name, file))
            checkpoint_store.read(copy)  # also checks the digest of its contents
            checkpoint_store.keep_refused(folder, [parent], facts)

    def _get(self, source: str, path: Path, expected: StoredFile) -> None:
        try:
            self._files.get_file(source, str(path))
        except FileNotFoundError:
            raise ConfigError(f"{source} is missing", remedy=_OLDER_IS_USED) from None
        found = StoredFile.of(path)
        if found.sha256 != expected.sha256:
            raise ConfigError(
                f"{source} has {found.bytes} bytes and the SHA-256 {found.sha256[:12]}; "
                f"{expected.bytes} bytes and {expected.sha256[:12]} were written",
                remedy=_OLDER_IS_USED,
            )

    def _retried(self, work: Callable[[], T]) -> T:
        for wait_s in FETCH_RETRY_AFTER_S:
            try:
                return work()
            except ConfigError:
                raise
            except Exception as error:
                log.warning("%s: reading failed (%s); trying again", self.shown, _describe(error))
                time.sleep(wait_s)
        return work()


def _collect_errors(work: Callable[[], None], failures: list[Exception]) -> None:
    try:
        work()
    except Exception as error:
        failures.append(error)
