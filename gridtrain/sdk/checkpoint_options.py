"""The options of checkpoints, with their default folder, and of the residual that a leaving worker sends."""

from __future__ import annotations

from pathlib import Path

from gridtrain.config import JoinConfig
from gridtrain.errors import ConfigError
from gridtrain.runtime.client.worker_defaults import run_folder_name, state_directory
from gridtrain.training.model_state import ModelStateOptions


def checkpoint_options(config: JoinConfig) -> ModelStateOptions:
    """Return the options for checkpoints and for the residual that a leaving worker sends.

    By default, each worker on a machine has its own folder, in a folder named after the coordinator's key.
    Raises `ConfigError` if a number in `config` is not an integer >= 0.
    """
    folder = Path(config.state_dir or "")
    if not config.state_dir:
        worker = run_folder_name(Path(config.identity).stem or config.name)
        folder = state_directory(config.run) / "checkpoints" / config.coordinator_key[:16] / worker
    return ModelStateOptions(
        folder,
        every=_parse_int("checkpoint_every", config.checkpoint_every),
        keep=_parse_int("checkpoint_keep", config.checkpoint_keep),
        url=config.checkpoints,
        max_transfer_bytes=_parse_int("handover_mib", config.handover_mib) << 20,
        is_chosen=bool(config.state_dir),
        saves_on_leave=config.state_dir is not None,
    )


def _parse_int(name: str, text: str) -> int:
    """Parse an integer >= 0; raise `ConfigError` for any other string."""
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be an integer >= 0", remedy=f"try {name}=16")
    return int(text)
