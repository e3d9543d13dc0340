"""Reads run.toml and checks its tables, keys and limits.

    [run]            the script and its description; part of the bundle (`gridtrain.tools.bundle`)
    [run.data]       the data set: an index of its files, or one file by its digest
    [coordinator]    options of `gridtrain coordinator`, with underscores
    [worker]         options of `gridtrain worker`

An unknown table or key is refused; the error suggests the nearest known name.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from gridtrain.errors import ConfigError, disk_errors
from gridtrain.tools.options.option_table import PROGRAMS, Option, OptionKind, OptionValue

RUN_FILE = "run.toml"
MAX_FILE_BYTES = 1 << 16
MAX_TEXT = 512
MAX_ITEMS = 128  # of a list; a bundle has as many files (bundle_archive.py)
RUN_KEYS = ("name", "about", "script", "digest", "arguments", "files", "requires", "image", "data")
DATA_KEYS = ("index", "file", "digest", "url", "bytes", "where")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CODE = re.compile(r".*\.(py[cdow]?|so[.0-9]*|dylib|dll|sh|exe|bat|cmd)", re.IGNORECASE)
_REQUIRED = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?)(?:\s*>=\s*(\d+(?:\.\d+){0,3}))?")


@dataclass(frozen=True, slots=True)
class DatasetDescription:
    """The data set that a run's script reads: either many files, listed in an index, or one file.

    Attributes:
        file: the path of the file, relative to the worker's `data_dir` or to the bundle's folder; "" if
            `index` is set.
        digest: the digest of the file's bytes: "sha256:" and 64 hexadecimal digits.
        where: text for volunteers, such as the licence, or how to get the file.
        index: the path, relative to run.toml, of an index that `gridtrain data index` has written, which
            the bundle contains; "" if `file` is set.
        url: the URL from which workers fetch the file; "" if volunteers have to get it themselves.
        bytes: the size of the file if `url` is set, otherwise 0.
    """

    file: str = ""
    digest: str = ""
    where: str = ""
    index: str = ""
    url: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunDescription:
    """The table [run] of a run.toml.

    Attributes:
        about: one line of text for volunteers.
        script: the path of the script, relative to run.toml; "" if the run has no bundle.
        digest: the digest of the script, "sha256:..."; "" if it is not checked; always set in a bundle.
        arguments: the arguments of the script.
        files: the relative paths of further files in the bundle.
        requires: the required packages, as (name, minimum version or "").
        image: the name of a container image that contains all required packages; "" if there is none.
    """

    name: str = "default"
    about: str = ""
    script: str = ""
    digest: str = ""
    arguments: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    requires: tuple[tuple[str, str], ...] = ()
    image: str = ""
    data: DatasetDescription | None = None

    @property
    def requirements(self) -> list[str]:
        """The required packages as in run.toml, such as "torch>=2.6"."""
        return [f"{name}>={least}" if least else name for name, least in self.requires]

    @property
    def data_index(self) -> str:
        """The path of the data set's index; "" if the run names none."""
        return "" if self.data is None else self.data.index


@dataclass(frozen=True, slots=True)
class RunFile:
    """The content of a run.toml.  If there is no such file, `path` is None, and no option is set.

    Attributes:
        run: the table [run], checked.
        tables: all tables as read, by name; `option_value` checks their values.
    """

    path: Path | None = None
    run: RunDescription = field(default_factory=RunDescription)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def find(cls, environ: Mapping[str, str], folder: Path | None = None) -> RunFile:
        """Read the file that `GRIDTRAIN_CONFIG` names, or run.toml in `folder` (by default the current
        directory).

        If `GRIDTRAIN_CONFIG` is not set and there is no run.toml, no option is set.  Raises `ConfigError` if
        the file cannot be read or its content is invalid.
        """
        if named := environ.get("GRIDTRAIN_CONFIG"):
            return cls.read(Path(named))
        path = (folder or Path()) / RUN_FILE
        return cls.read(path) if path.is_file() else cls()

    @classmethod
    def read(cls, path: Path) -> RunFile:
        """Read a run.toml.  Raises `ConfigError` if it cannot be read or its content is invalid."""
        remedy = "choose another file with GRIDTRAIN_CONFIG"
        with disk_errors(f"{path} cannot be read", remedy), path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> RunFile:
        """Parse a run.toml.  Raises a `ConfigError` that names `path` if it is too large or invalid."""
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_FILE_BYTES} bytes", remedy="store large data in other files"
            )
        try:
            document = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text", remedy="save the file as UTF-8") from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: {error or 'lists are nested too deeply'}",
                remedy="see docs/configuration.md for the format of the file",
            ) from None
        check_keys(f"{path}:", document, ("run", *PROGRAMS))
        for table, value in document.items():
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{path}: {table} is {value!r}, not a table", remedy=f"write a table: [{table}]"
                )
        run = _run(path, document.get("run", {}))
        for program, options in PROGRAMS.items():
            places = [one.toml_location(program) for one in options if not one.is_command_line_only]
            own = [key for table, key in places if table == program]
            check_keys(f"{path}: [{program}]", document.get(program, {}), own)
        return cls(path, run, document)

    def option_value(self, program: str, one: Option) -> tuple[OptionValue, str] | None:
        """Return the option's value and where the file sets it; None if the option is not set.

        Raises `ConfigError` if the value is invalid.
        """
        table, key = one.toml_location(program)
        values = self.tables.get(table, {})
        if one.is_command_line_only or key not in values:
            return None
        where = f"{self.path} [{table}] {key}"
        value = one.from_toml(values[key], where)
        if one.kind is OptionKind.FOLDER and isinstance(value, str) and value and self.path is not None:
            # Relative to the file, not to the working directory.
            value = str(self.path.parent / Path(value).expanduser())
        return value, where


def check_keys(where: str, found: Iterable[str], known: Collection[str]) -> None:
    """Raise `ConfigError` for the first unknown key; the remedy suggests a similar key, or all known keys.

    Args:
        where: the file and the table that have the keys, as the beginning of the message.
    """
    for key in found:
        if key not in known:
            near = nearest_word(key, known)
            raise ConfigError(
                f"{where} {key!r} is not a known key",
                remedy=f"did you mean {near!r}?" if near else f"use one of {', '.join(known)}",
            )


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to `word`; None if no word is similar."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else None


# -- [run] -------------------------------------------------------------------------------------------


def _run(path: Path, table: Mapping[str, Any]) -> RunDescription:
    check_keys(f"{path}: [run]", table, RUN_KEYS)
    script = _text(path, table, "script")
    run = RunDescription(
        name=_text(path, table, "name") or "default",
        about=_text(path, table, "about"),
        script=_relative(path, "[run] script", script) if script else "",
        digest=_digest(path, _text(path, table, "digest")),
        arguments=_texts(path, table, "arguments"),
        files=tuple(_relative(path, "[run] files", name) for name in _texts(path, table, "files")),
        requires=read_requires(path, table),
        image=_text(path, table, "image"),
        data=_data(path, table["data"]) if "data" in table else None,
    )
    if not run.script and (run.files or run.digest or run.arguments):
        raise ConfigError(
            f"{path}: [run] has files, a digest or arguments, but no script",
            remedy='write script = "train.py", or remove these keys',
        )
    if run.data is not None:
        _refuse_code(path, run, run.data)
    return run


def _refuse_code(path: Path, run: RunDescription, data: DatasetDescription) -> None:
    """Raise `ConfigError` if the data set's file could be run, or is fetched in place of a bundle's file.

    Volunteers can read the bundle before they accept it, but not the file, which is linked beside the script.
    """
    if _CODE.fullmatch(data.file):
        what, remedy = "Python or a shell could run", "add it to [run] files if it is code"
    elif data.url and data.file in (RUN_FILE, run.script, *run.files):
        what, remedy = "is also a file of the bundle", "remove it from [run] files, or remove its url"
    else:
        return
    raise ConfigError(
        f"{path}: [run.data] file is {data.file!r}, which {what}", remedy=f"rename the file, or {remedy}"
    )


def _data(path: Path, table: object) -> DatasetDescription:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [run] data is {table!r}, not a table", remedy="write a table: [run.data]")
    check_keys(f"{path}: [run.data]", table, DATA_KEYS)
    where, url, index, given, digest = (
        _text(path, table, key, "run.data") for key in ("where", "url", "index", "file", "digest")
    )
    nbytes = table.get("bytes", 0)
    if index:
        if table.keys() - {"index", "where"}:
            raise ConfigError(
                f"{path}: [run.data] has index and {', '.join(sorted(table.keys() - {'index', 'where'}))}",
                remedy="keep index and where: the index has the URLs, sizes and digests of its files",
            )
        return DatasetDescription(index=_relative(path, "[run.data] index", index), where=where)
    file = _relative(path, "[run.data] file", given)
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{path}: [run.data] {f'digest is {digest!r}' if digest else 'has no digest'}",
            remedy=f'write digest = "sha256:..." with 64 digits, from: sha256sum {file}',
        )
    is_size = type(nbytes) is int and nbytes >= 0
    is_remote = "://" in url and not url.startswith("file:")
    if bool(url) != is_remote or not is_size or bool(nbytes) != bool(url):
        raise ConfigError(
            f"{path}: [run.data] has url = {url!r} and bytes = {nbytes!r}, which do not describe a download",
            remedy="write both, or neither: the URL of the file, and its size in bytes from: stat -c %s FILE",
        )
    return DatasetDescription(file, digest, where, "", url, nbytes)


def _text(path: Path, table: Mapping[str, Any], key: str, name: str = "run") -> str:
    return _plain(path, f"[{name}] {key}", table.get(key, ""))


def _plain(path: Path, key: str, value: object) -> str:
    if isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
        return value
    quoted = "" if isinstance(value, str) else ", in quotes"
    raise ConfigError(
        f"{path}: {key} is {value!r:.200}", remedy=f"write one line of at most {MAX_TEXT} characters{quoted}"
    )


def _texts(path: Path, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = table.get(key, [])
    if not isinstance(values, list) or len(values) > MAX_ITEMS:
        raise ConfigError(
            f"{path}: [run] {key} is {values!r:.200}", remedy=f"write a list of at most {MAX_ITEMS} strings"
        )
    return tuple(_plain(path, f"[run] {key}", value) for value in values)


def _relative(path: Path, key: str, text: str) -> str:
    if not is_safe_relative_name(text):
        raise ConfigError(
            f"{path}: {key} refers to {text!r}, which is not allowed",
            remedy="specify a file in the folder of run.toml or below it, using only letters, digits "
            "and . _ -",
        )
    return text


def is_safe_relative_name(name: str) -> bool:
    """Return whether `name` is a relative path that stays inside its folder and is safe in a shell.

    Such a name has at most 100 characters (letters, digits and . _ / -), and no part that begins with a dot
    or a dash, or ends with a dot.
    """
    parts = PurePosixPath(name).parts
    plain = re.fullmatch(r"[A-Za-z0-9._/-]{1,100}", name) is not None and "/".join(parts) == name
    return plain and all(part[0] not in ".-/" and not part.endswith(".") for part in parts)


def _digest(path: Path, text: str) -> str:
    if text and not _DIGEST.fullmatch(text):
        raise ConfigError(
            f"{path}: [run] digest is {text!r}, which is not a digest",
            remedy='write "sha256:" and 64 digits, as sha256sum prints them, or remove the key',
        )
    return text


def read_requires(path: Path, table: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the packages of the table's `requires`, as (name, minimum version or "").

    Raises a `ConfigError` that names `path` if an entry is not a package with an optional minimum version.
    """
    return tuple(_required(path, text) for text in _texts(path, table, "requires"))


def _required(path: Path, text: str) -> tuple[str, str]:
    match = _REQUIRED.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{path}: [run] requires {text!r}, which is not a package name with an optional minimum version",
            remedy='write a package, with or without a minimum version: "torch>=2.6"',
        )
    return match[1], match[2] or ""
