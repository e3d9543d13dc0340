"""Checks that optional packages (torch, transformers, ...) are installed; errors say which to install."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from gridtrain._version import __version__
from gridtrain.errors import ConfigError

TORCH = ("torch", "safetensors")

_CHECKOUT = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """Return the pip command that adds `extra` to this installation, from its checkout or from its wheel.

    gridtrain is not on a package index; once it is, only this function has to change.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[{extra}]')}"
    return f"pip install 'gridtrain-{__version__}-py3-none-any.whl[{extra}]'"


def require_torch(who: str) -> None:
    """Raise `ConfigError` unless the packages of the extra `torch` can be imported.

    Args:
        who: the name of the function or module that needs the packages, such as "gridtrain.join".
    """
    missing = [name for name in TORCH if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{who} needs {' and '.join(missing)} to be installed",
            remedy=f"{install_command('torch')} (or install the torch build that fits your GPU first)",
        )


def require(package: str, who: str) -> None:
    """Raise `ConfigError` unless the optional `package`, which `who` needs, can be imported."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} needs {package} to be installed", remedy=f"pip install {package}")


def require_packages(requires: Iterable[tuple[str, str]], who: str, image: str = "") -> None:
    """Raise `ConfigError` if any packages are missing or too old.

    Args:
        requires: for each package, its name and its minimum version, which is "" for any version.
        who: what needs the packages, such as "the run's script".
        image: a container image that contains them; "" if there is none.
    """
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    missing = []
    for name, least in requires:
        try:
            found = version(name)
        except PackageNotFoundError:
            missing.append(f"{name}>={least}" if least else name)
            continue
        if least and _release(found) < _release(least):
            missing.append(f"{name}>={least}")
    if missing:
        quoted = " ".join(f"'{name}'" for name in missing)
        raise ConfigError(
            f"{who} needs packages that are missing or too old: {', '.join(missing)}",
            remedy=f"run {sys.executable} -m pip install {quoted}"
            + (f", or use the image {image}" if image else ""),
        )


def _release(text: str) -> tuple[int, ...]:
    """Return the release number of a version without trailing zeros, such as (2, 10) for "2.10.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
