"""What is installed only with an extra: one sentence where it is missing, instead of an ImportError.

Decides nothing, and loads nothing.
"""

from __future__ import annotations

import importlib.util

from gridtrain.errors import ConfigError

TORCH = ("torch", "safetensors")


def require_torch(who: str) -> None:
    """Raise `ConfigError` unless the packages of the extra `torch` can be imported.

    Args:
        who: what needs them, such as "gridtrain.join".
    """
    missing = [name for name in TORCH if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{who} needs {' and '.join(missing)}, not installed here",
            remedy="pip install 'gridtrain[torch]' (or install the torch build that fits your GPU first)",
        )


def require(package: str, who: str) -> None:
    """Raise `ConfigError` unless `package` can be imported: it is optional, and `who` needs it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} needs {package}, not installed here", remedy=f"pip install {package}")
