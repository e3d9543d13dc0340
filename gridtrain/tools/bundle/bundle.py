"""Makes a bundle from run.toml and the files that it lists, and checks the bundle that a coordinator sends.

The description contains the script's digest, and names exactly the files in the bundle.  It is the table
[run] of the owner's run.toml; the options of the coordinator and the worker are not part of the bundle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gridtrain.errors import ConfigError, RemoteProtocolError, disk_errors
from gridtrain.tools.bundle.bundle_archive import MAX_BUNDLE_BYTES, ArchiveError, pack, unpack
from gridtrain.tools.options.runfile import DATA_KEYS, RUN_FILE, RunDescription, RunFile

_TOO_LARGE_REMEDY = "describe large data in [run.data], which volunteers download separately"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A run's script and description.

    Attributes:
        digest: the digest of `archive`, "sha256:...", which a volunteer accepts.
        run: the description of the run; its `digest` is the script's.
        files: the content of each file by name, run.toml included.
        archive: the bytes that are sent: the files as `pack` packs them.
    """

    digest: str
    run: RunDescription
    files: Mapping[str, bytes] = field(repr=False)
    archive: bytes = field(repr=False)

    @classmethod
    def from_run_file(cls, runfile: RunFile) -> Bundle | None:
        """Make the bundle of the owner's run.toml; return None if it names no script.

        Raises:
            ConfigError: a file cannot be read, the script's digest differs from the one in run.toml, the data
                set's index is invalid, run.toml lists itself, or the files cannot be packed (see `pack`).
        """
        run = runfile.run
        if not run.script or runfile.path is None:
            return None
        folder = runfile.path.parent
        named = {run.script: None, **dict.fromkeys(run.files)}
        if run.data_index:
            named[run.data_index] = None
        contents = {name: _read(folder / name) for name in named}
        if RUN_FILE in contents:
            raise ConfigError(
                f"{runfile.path}: [run] lists {RUN_FILE} itself",
                remedy="remove it from [run], because it is always included",
            )
        if run.data_index:
            _check_index(folder / run.data_index, contents[run.data_index])
        known = digest_of(contents[run.script])
        if run.digest and run.digest != known:
            raise ConfigError(
                f"{folder / run.script} has the digest {known}, but {runfile.path} specifies {run.digest}",
                remedy="write the new digest into run.toml to serve this script, or restore the old script",
            )
        run = replace(run, digest=known, files=tuple(sorted({*named} - {run.script})))
        files = {RUN_FILE: run_to_toml(run).encode(), **contents}
        try:
            archive = pack(files)
        except ArchiveError as error:
            raise ConfigError(
                f"{runfile.path} does not describe a bundle: {error}",
                remedy=f"change the files in [run]; {_TOO_LARGE_REMEDY}",
            ) from None
        return cls(digest_of(archive), run, files, archive)

    @classmethod
    def from_archive(cls, archive: bytes, digest: str) -> Bundle:
        """Read the bundle that a coordinator sent.  Raises `RemoteProtocolError` if its digest is not
        `digest`, or if it is not a valid bundle."""
        if digest_of(archive) != digest:
            raise _wrong(f"it has the digest {digest_of(archive)}, but {digest} was requested")
        files = unpack(archive)
        text = files.get(RUN_FILE, b"")
        try:
            read = RunFile.parse(text, Path(RUN_FILE))
        except ConfigError as error:
            raise _wrong(error.reason) from None
        run = read.run
        if run_to_toml(run).encode() != text:
            raise _wrong(f"its {RUN_FILE} is not in canonical form")
        if set(files) != {RUN_FILE, run.script, *run.files} or not run.script:
            raise _wrong(f"its {RUN_FILE} lists files other than those in the archive")
        if run.data_index and run.data_index not in files:
            raise _wrong(f"it has no file {run.data_index}, the index of its data set")
        if digest_of(files[run.script]) != run.digest:
            raise _wrong(f"{run.script} does not have the digest that its {RUN_FILE} gives")
        return cls(digest, run, files, archive)


def digest_of(content: bytes) -> str:
    """Return "sha256:" and the SHA-256 digest in hexadecimal, as `sha256sum` prints it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def run_to_toml(run: RunDescription) -> str:
    """Return the canonical text of a bundle's run.toml, which `RunFile.parse` can read."""
    pairs: list[tuple[str, str | list[str]]] = [
        ("name", run.name),
        ("about", run.about),
        ("script", run.script),
        ("digest", run.digest),
        ("arguments", list(run.arguments)),
        ("files", list(run.files)),
        ("requires", run.requirements),
        ("image", run.image),
    ]
    lines = ["[run]", *(f"{key} = {_quoted(value)}" for key, value in pairs if value)]
    if run.data is not None:
        data = [(key, getattr(run.data, key)) for key in DATA_KEYS]
        lines += ["", "[run.data]", *(f"{key} = {_quoted(value)}" for key, value in data if value)]
    return "\n".join(lines) + "\n"


def _quoted(value: str | list[str] | int) -> str:
    """Return a TOML string, list or number in JSON's form, which is valid TOML for printable text."""
    return json.dumps(value, ensure_ascii=False)


def _read(path: Path) -> bytes:
    remedy = f"restore the file, or correct its path in {RUN_FILE}"
    with (
        disk_errors(f"{path}, which is listed in {RUN_FILE}, cannot be read", remedy),
        path.open("rb") as file,
    ):
        content = file.read(MAX_BUNDLE_BYTES + 1)
    if len(content) > MAX_BUNDLE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BUNDLE_BYTES} bytes", remedy=_TOO_LARGE_REMEDY)
    return content


def _check_index(path: Path, content: bytes) -> None:
    """Raise `ConfigError` if the index is malformed, or lists files that only the owner's machine has."""
    try:
        urls = [str(shard["url"]) for shard in json.loads(content)["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, the index in [run.data], is malformed: {type(error).__name__}: {error}",
            remedy="write one with `gridtrain data index FILES --url URL --out index.json`",
        ) from None
    if unusable := [url for url in urls if url.startswith(("/", "file:"))]:
        raise ConfigError(
            f"{path} lists {unusable[0]}, a file on this machine that volunteers cannot read",
            remedy="publish the files and regenerate the index with `gridtrain data index FILES --url URL`",
        )


def _wrong(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"this is not the bundle that was announced: {reason}",
        remedy="inform the run's owner; nothing from this bundle was run or stored",
    )
