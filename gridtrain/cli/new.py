"""`gridtrain new FOLDER`: create a run that trains at once.

The files are in gridtrain/tools/templates; existing files are not replaced.
"""

from __future__ import annotations

import contextlib
import shlex
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gridtrain.errors import ConfigError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

RUN_FILE, PLACEHOLDER = "run.toml", "NAME"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--name", default="", help="The run's name.  [default: the folder's]")
def new(folder: Path, name: str) -> None:
    """Create a folder with a script that trains, and the files that belong to it.

    \b
      gridtrain new my-run
    """
    from gridtrain.core.group.invitation import RUN_NAME

    name = name or folder.resolve().name
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a run's name",
            remedy="use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit: --name NAME",
        )
    written = _write(folder, templates(name))
    click.echo(_told(folder, written))


def templates(name: str = PLACEHOLDER) -> dict[str, str]:
    """Name -> text of each file of a new run."""
    texts = dict(_texts(files("gridtrain.tools").joinpath("templates", "new"), ""))
    return texts | {RUN_FILE: texts[RUN_FILE].replace(PLACEHOLDER, name)}


def _texts(folder: Traversable, before: str) -> list[tuple[str, str]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += [] if entry.name == "__pycache__" else _texts(entry, f"{before}{entry.name}/")
        else:
            found.append((before + entry.name, entry.read_text(encoding="utf-8")))
    return found


def _write(folder: Path, texts: dict[str, str]) -> list[str]:
    """Write all files; none if one of them exists."""
    there = [name for name in texts if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"{folder} has {', '.join(there)} already", remedy="name another folder, or move that away"
        )
    begun: list[Path] = []
    try:
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            begun.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in begun:  # what a full disk left would stand in the way of the next attempt
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror}", remedy="name another folder"
        ) from None
    return list(texts)


def _told(folder: Path, written: list[str]) -> str:
    return "\n".join(
        [
            f"{folder} has {', '.join(written)}.",
            "Try it here, in three terminals that are all in it:",
            "",
            f"  cd {shlex.quote(str(folder))}",
            "  gridtrain coordinator",
            '  gridtrain worker "$(gridtrain invite --wait 30s)"      # twice; shows what it runs, and asks',
            "",
            "`gridtrain status --watch` there shows the run.  For other machines let the coordinator listen",
            "at tcp://0.0.0.0:7700 (in run.toml), and send each volunteer an invitation.",
            "The same in containers: compose.yaml, and compose.volunteer.yaml for a volunteer; each begins",
            "with what to type.",
        ]
    )
