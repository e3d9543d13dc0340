"""One bundle: made from a run.toml and the files it names, or read from a coordinator's archive.

The description names the script by digest, and exactly the files in the bundle.  Of the owner's run.toml only
[run] is included: the coordinator's address and a worker's limits are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.tools.bundle.bundle_archive import MAX_BUNDLE_BYTES, ArchiveError, pack, unpack
from gridtrain.tools.options.runfile import RUN_FILE, RunDescription, RunFile

_TOO_LARGE_REMEDY = "name large data in [run.data] instead, which volunteers get elsewhere"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Attributes:
    digest: "sha256:..." of `archive`: what a volunteer accepts.
    run: the description of the run; its `digest` is the script's.
    files: content by name, run.toml included.
    """

    digest: str
    run: RunDescription
    files: Mapping[str, bytes] = field(repr=False)
    archive: bytes = field(repr=False)

    @classmethod
    def from_run_file(cls, runfile: RunFile) -> Bundle | None:
        """The bundle of the owner's run.toml; None: it names no script.

        Raises:
            ConfigError: a file is missing, the script has another digest than run.toml says, or the bundle is
            too
                large.
        """
        run = runfile.run
        if not run.script or runfile.path is None:
            return None
        folder = runfile.path.parent
        contents = {name: _read(folder / name) for name in dict.fromkeys((run.script, *run.files))}
        if RUN_FILE in contents:
            raise ConfigError(
                f"{runfile.path}: [run] names {RUN_FILE} itself", remedy="leave it out: it is always there"
            )
        known = digest_of(contents[run.script])
        if run.digest and run.digest != known:
            raise ConfigError(
                f"{folder / run.script} has the digest {known}, and {runfile.path} says {run.digest}",
                remedy="if the script is as you want it, write its digest into run.toml; else restore it",
            )
        run = replace(run, digest=known, files=tuple(sorted({*run.files} - {run.script})))
        files = {RUN_FILE: run_to_toml(run).encode(), **contents}
        try:
            archive = pack(files)
        except ArchiveError as error:
            raise ConfigError(f"{runfile.path} names no bundle: {error}", remedy=_TOO_LARGE_REMEDY) from None
        return cls(digest_of(archive), run, files, archive)

    @classmethod
    def from_archive(cls, archive: bytes, digest: str) -> Bundle:
        """The bundle that a coordinator sent.  Raises `RemoteProtocolError` if digest or form differ."""
        if digest_of(archive) != digest:
            raise _wrong(f"it has the digest {digest_of(archive)}, and {digest} was asked for")
        files = unpack(archive)
        text = files.get(RUN_FILE, b"")
        try:
            read = RunFile.parse(text, Path(RUN_FILE))
        except ConfigError as error:
            raise _wrong(error.reason) from None
        run = read.run
        if run_to_toml(run).encode() != text:
            raise _wrong(f"its {RUN_FILE} is not in the form in which a coordinator writes it")
        if set(files) != {RUN_FILE, run.script, *run.files} or not run.script:
            raise _wrong(f"its {RUN_FILE} names other files than there are")
        if digest_of(files[run.script]) != run.digest:
            raise _wrong(f"{run.script} is not the script that its {RUN_FILE} has the digest of")
        return cls(digest, run, files, archive)


def digest_of(content: bytes) -> str:
    """The digest as `sha256sum` prints it, after "sha256:"."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def run_to_toml(run: RunDescription) -> str:
    """The canonical form of [run] in a bundle; `RunFile.parse` reads it."""
    pairs: list[tuple[str, str | list[str]]] = [
        ("name", run.name),
        ("about", run.about),
        ("script", run.script),
        ("digest", run.digest),
        ("arguments", list(run.arguments)),
        ("files", list(run.files)),
        ("requires", [f"{name}>={least}" if least else name for name, least in run.requires]),
        ("image", run.image),
    ]
    lines = ["[run]", *(f"{key} = {_quoted(value)}" for key, value in pairs if value)]
    if run.data is not None:
        data = (("file", run.data.file), ("digest", run.data.digest), ("where", run.data.where))
        lines += ["", "[run.data]", *(f"{key} = {_quoted(value)}" for key, value in data if value)]
    return "\n".join(lines) + "\n"


def _quoted(value: str | list[str]) -> str:
    """A TOML string: JSON's form, as only printable text is accepted."""
    return json.dumps(value, ensure_ascii=False)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}, which {RUN_FILE} names, cannot be read: {error.strerror}",
            remedy=f"mend script and files in [run] of {RUN_FILE}",
        ) from None
    if len(content) > MAX_BUNDLE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BUNDLE_BYTES} bytes", remedy=_TOO_LARGE_REMEDY)
    return content


def _wrong(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"this is not the bundle that was announced: {reason}",
        remedy="tell the run's owner; nothing of it was run or kept",
    )
