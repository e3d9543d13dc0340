"""Optional dependencies: a sentence that says what to install where one is missing."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

from gridtrain._version import __version__
from gridtrain.errors import ConfigError

TORCH = ("torch", "safetensors")

_CHECKOUT = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The pip command that adds `extra` to this installation, from its checkout or from its wheel.

    gridtrain is on no package index; once it is, this function alone changes.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[{extra}]')}"
    return f"pip install 'gridtrain-{__version__}-py3-none-any.whl[{extra}]'"


def require_torch(who: str) -> None:
    """Raise `ConfigError` unless the packages of the extra `torch` can be imported.

    Args:
        who: what needs them, such as "gridtrain.join".
    """
    missing = [name for name in TORCH if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{who} needs {' and '.join(missing)}, not installed here",
            remedy=f"{install_command('torch')} (or install the torch build that fits your GPU first)",
        )


def require(package: str, who: str) -> None:
    """Raise `ConfigError` unless `package` can be imported: it is optional, and `who` needs it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} needs {package}, not installed here", remedy=f"pip install {package}")
