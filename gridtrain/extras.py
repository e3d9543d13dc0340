"""Checks for optional dependencies; their errors say what to install."""

from __future__ import annotations

import importlib.util
import shlex
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
