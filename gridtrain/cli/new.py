"""`gridtrain new FOLDER`: creates a run's files from a template, and prints the commands to run next.

The files are in gridtrain/tools/templates: the `new` folder has the files of every run and the script of the
`vision` template; each other template has its own folder.  Existing files are not replaced, and no run is
created inside another one.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import textwrap
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gridtrain.cli.option_flags import default_option
from gridtrain.cli.output import TEXT_WIDTH
from gridtrain.errors import ConfigError
from gridtrain.extras import install_command

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

RUN_FILE, TEXT_FILE = "run.toml", "text.txt"
TEXT_BYTES = 200_000
"""The size of the text for a language model: enough for a few minutes of training, and small to send."""


@dataclass(frozen=True, slots=True)
class Template:
    """What is specific to the runs of one template.

    Attributes:
        about: a one-line description of the run for volunteers.
        requires: the packages that the script needs.
        min_workers: the number of workers that the run needs to start.
        checkpoint_every: the number of steps between two checkpoints of a worker.
        has_text: whether the script reads a text, which is written to the run's folder.
    """

    about: str
    requires: tuple[str, ...] = ("torch>=2.6",)
    min_workers: int = 2
    checkpoint_every: int = 500
    has_text: bool = False


_TRANSFORMERS = ("torch>=2.6", "transformers>=4.57")
TEMPLATES = {
    "lora": Template(
        "LoRA adapters of a language model learn a text", (*_TRANSFORMERS, "peft>=0.17"), 3, 10, True
    ),
    "pretrain": Template(
        "a small Llama learns a text from scratch", _TRANSFORMERS, checkpoint_every=10, has_text=True
    ),
    "vision": Template("a small network learns to recognize shapes in noisy images"),
}
DEFAULT = "vision"
_TIMES = {2: "twice", 3: "three times"}


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--name", help="The run's name.  [default: the folder's name]")
@default_option(
    "--template",
    DEFAULT,
    "The script: fine-tune a language model, train one from scratch, or recognize images.",
    type=click.Choice(list(TEMPLATES)),
)
def new(folder: str, name: str | None, template: str) -> None:
    """Create a folder with a script that is ready to train, and the other files of its run.

    \b
      gridtrain new my-run
      gridtrain new my-run --template lora      needs transformers and peft
    """
    from gridtrain.core.group.invitation import RUN_NAME

    if not folder:
        raise ConfigError(
            "the name of the folder is empty",
            remedy="name the run's folder: gridtrain new my-run, or gridtrain new . for this directory",
        )
    name = Path(folder).resolve().name if name is None else name
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid run name",
            remedy="use 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or a digit: "
            "--name NAME",
        )
    written = _write(Path(folder), templates(name, template))
    click.echo(_instructions(Path(folder), written, TEMPLATES[template]))


def templates(name: str = "NAME", template: str = DEFAULT) -> dict[str, str]:
    """Return the text of each file of a new run, by name.

    Raises `ConfigError` if the template's text cannot be read (see `load_corpus`).
    """
    chosen, folder = TEMPLATES[template], files("gridtrain.tools").joinpath("templates")
    texts = dict(_texts(folder.joinpath("new"), ""))
    if template != DEFAULT:
        texts |= dict(_texts(folder.joinpath(template), ""))
    if chosen.has_text:
        texts[TEXT_FILE] = _sample_text()
    values = {
        "NAME": name,
        "ABOUT": chosen.about,
        # Padded, so that the comment after it stays in its column.
        f"[FILES]{' ' * 22}": (f'["{TEXT_FILE}"]' if chosen.has_text else "[]").ljust(24),
        "[REQUIRES]": "[" + ", ".join(f'"{package}"' for package in chosen.requires) + "]",
        "MIN_WORKERS": str(chosen.min_workers),
        "CHECKPOINT_EVERY": str(chosen.checkpoint_every),
    }
    placeholders = "|".join(map(re.escape, values))
    texts[RUN_FILE] = re.sub(placeholders, lambda found: values[found[0]], texts[RUN_FILE])
    return texts


def _sample_text() -> str:
    """Return at most `TEXT_BYTES` of source code of Python's standard library, so nothing is downloaded."""
    from gridtrain.tools.demo.text_corpus import load_corpus

    text = load_corpus().train[:TEXT_BYTES]
    return text[: text.rfind(b"\n") + 1].decode(errors="replace")


def _texts(folder: Traversable, before: str) -> list[tuple[str, str]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += [] if entry.name == "__pycache__" else _texts(entry, f"{before}{entry.name}/")
        else:
            found.append((before + entry.name, entry.read_text(encoding="utf-8")))
    return found


def _free_name(folder: Path) -> Path:
    """Return a path beside `folder` that does not exist."""
    return next(path for n in count(2) if not (path := folder.with_name(f"{folder.name}-{n}")).exists())


def _write(folder: Path, texts: dict[str, str]) -> list[str]:
    """Write all files, and return their names.

    Raises `ConfigError`, and leaves no file behind, if one of the files exists, if the folder would be inside
    that of another run, or if a file cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", remedy="choose another folder, or move the file away")
    place = folder.resolve()
    outer = next((each for each in place.parents if each.name and (each / RUN_FILE).exists()), None)
    if outer is not None:
        raise ConfigError(
            f"{folder} would be inside the folder of another run, {outer}",
            remedy=f"choose a folder outside it: gridtrain new {shlex.quote(str(_free_name(outer)))}",
        )
    there = [name for name in texts if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"{folder} already contains {', '.join(there)}",
            remedy="choose another folder, or move these files away",
        )
    begun: list[Path] = []
    new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
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
        for made in new_folders:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror}", remedy="choose another folder"
        ) from None
    return list(texts)


def _install(template: Template, missing: list[str]) -> str:
    """Return the pip command that installs the missing packages."""
    if "peft" in missing:
        return install_command("lora")
    command = install_command("torch") if "torch" in missing else "pip install"
    others = [each for each in template.requires if each.split(">=")[0] in {*missing} - {"torch"}]
    return shlex.join((*shlex.split(command), *others))


def _instructions(folder: Path, written: list[str], template: Template) -> str:
    """Return the next steps, in lines that fit a terminal of 80 columns unless a path is long."""
    workers = template.min_workers
    packages = [requirement.split(">=")[0] for requirement in template.requires]
    missing = [package for package in packages if find_spec(package) is None]
    needed = [f"It needs {' and '.join(missing)}:", f"  {_install(template, missing)}", ""] if missing else []
    return "\n".join(
        [
            textwrap.fill(f"{folder} has {', '.join(written)}.", TEXT_WIDTH, break_on_hyphens=False),
            *needed,
            f"Try it on this machine, in {workers + 1} terminals in the new folder:",
            "",
            f"  cd {shlex.quote(str(folder))}",
            "  gridtrain coordinator",
            f'  gridtrain worker "$(gridtrain invite --wait 30s)"   # {_TIMES[workers]}',
            "",
            "A worker shows the script and asks before it runs it.  In another terminal",
            "`gridtrain status --watch` shows the run.",
            "",
            "For other machines, let the coordinator listen on tcp://0.0.0.0:7700 (in",
            "run.toml), and send each volunteer an invitation.  For containers see",
            "compose.yaml, and compose.volunteer.yaml for volunteers.",
        ]
    )
