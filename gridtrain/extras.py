"""Checks for optional packages: one sentence if one is missing, instead of an ImportError.  Imports none of
them."""

from __future__ import annotations

import importlib.util

from gridtrain.errors import ConfigError

TORCH = ("torch", "safetensors")


def require_torch(who: str) -> None:
    """Raise `ConfigError` unless the packages of the extra `torch` can be imported.

    Args:
        who: needs them, such as "gridtrain.join".
    """
    missing = [name for name in TORCH if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{who} needs {' and '.join(missing)}, not installed here",
            remedy="pip install 'gridtrain[torch]' (or install the torch build that fits your GPU first)",
        )


def require(package: str, who: str) -> None:
    """Raise `ConfigError` unless the optional `package`, which `who` needs, can be imported."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} needs {package}, not installed here", remedy=f"pip install {package}")
