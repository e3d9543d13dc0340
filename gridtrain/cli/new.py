"""`gridtrain new FOLDER`: creates a run that is ready to train.

The templates are in gridtrain/tools/templates; existing files are not replaced.
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
@click.option("--name", default="", help="The run's name.  [default: the folder's name]")
def new(folder: Path, name: str) -> None:
    """Create a folder with a script that is ready to train, and the other files of its run.

    \b
      gridtrain new my-run
    """
    from gridtrain.core.group.invitation import RUN_NAME

    name = name or folder.resolve().name
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid run name",
            remedy="use 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or a digit: "
            "--name NAME",
        )
    written = _write(folder, templates(name))
    click.echo(_told(folder, written))


def templates(name: str = PLACEHOLDER) -> dict[str, str]:
    """Return the text of each file of a new run, by name."""
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
    """Write all files, or none if one of them exists."""
    there = [name for name in texts if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"{folder} already contains {', '.join(there)}",
            remedy="choose another folder, or move these files away",
        )
    begun: list[Path] = []
    try:
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            begun.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in begun:  # otherwise these files would block the next attempt
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror}", remedy="choose another folder"
        ) from None
    return list(texts)


def _told(folder: Path, written: list[str]) -> str:
    return "\n".join(
        [
            f"{folder} has {', '.join(written)}.",
            "Try it on this machine, in three terminals:",
            "",
            f"  cd {shlex.quote(str(folder))}",
            "  gridtrain coordinator",
            '  gridtrain worker "$(gridtrain invite --wait 30s)"      # twice; shows the script, and asks',
            "",
            "`gridtrain status --watch` in the folder shows the run.  For other machines let the coordinator",
            "listen on tcp://0.0.0.0:7700 (in run.toml), and send each volunteer an invitation.",
            "For containers, see compose.yaml, and compose.volunteer.yaml for volunteers; each file begins",
            "with the commands.",
        ]
    )
