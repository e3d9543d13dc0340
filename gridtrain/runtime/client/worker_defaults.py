"""A worker's default name, such as "keen-otter-4f2a", its folders, and the address on which it listens.

Host names and user names are never used, because they are personal data.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from gridtrain.core.group.invitation import RUN_NAME
from gridtrain.errors import ConfigError, disk_errors
from gridtrain.network.transport.zmq.name_lookup import names

_LOOPBACK = "127.0.0.1"

_ADJECTIVES = (
    "amber",
    "brisk",
    "calm",
    "deft",
    "eager",
    "fair",
    "glad",
    "keen",
    "lucid",
    "mild",
    "neat",
    "quiet",
)
_ANIMALS = ("ant", "bear", "crane", "deer", "elk", "finch", "gecko", "hare", "ibis", "lynx", "otter", "wren")


def name_of_key(public: bytes) -> str:
    """Return a name such as "keen-otter-4f2a" for the worker with this public key.  Keys are random and kept
    across restarts, so the name stays the same and reveals nothing about the machine."""
    adjective, animal = _ADJECTIVES[public[0] % len(_ADJECTIVES)], _ANIMALS[public[1] % len(_ANIMALS)]
    return f"{adjective}-{animal}-{public[2:4].hex()}"


def state_directory(run: str) -> Path:
    """Return the folder for the files of `run`, which is `$XDG_STATE_HOME/gridtrain/<run>`.

    If XDG_STATE_HOME is not set, ~/.local/state is used instead.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "gridtrain" / run_folder_name(run)


def export_folder(run: str, export_dir: str) -> Path:
    """Create the folder for the final model, check that it can be written to, and return its path.

    The folder is `export_dir`, or the state directory of `run` if `export_dir` is "".  Call this function
    before training starts, while the user can still choose another folder, and again before the export.
    Raises `ConfigError` if `export_dir` is a URL or the folder cannot be written to.
    """
    if "://" in export_dir:
        raise ConfigError(
            f"export_dir is {export_dir!r}; it must be a folder",
            remedy="omit export_dir, and copy the final model to the URL with gridtrain export",
        )
    folder = Path(export_dir or state_directory(run))
    with disk_errors(
        f"the final model cannot be written to {folder}",
        "choose another folder with --export-dir (or gridtrain.join(export_dir=...)); if this worker has a "
        "checkpoint of a finished run, gridtrain export writes its model from --state-dir",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def identity_folder(run: str, coordinator: bytes) -> Path:
    """Return the folder with this user's identities in the run `run` of the coordinator with this key."""
    return state_directory(run) / "identities" / coordinator.hex()[:16]


def run_folder_name(run: str) -> str:
    """Return the name of the folder of a run.

    For an invalid run name, the result is a name that no valid run can have.
    """
    if RUN_NAME.fullmatch(run):
        return run
    digest = hashlib.blake2b(run.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', run)[:32].lstrip('._-')}={digest}"


def default_listen_address(coordinator: str) -> str:
    """Return the address of the network interface that leads to the coordinator, with port 0 (any free port).

    The interface is the loopback interface if the coordinator is on this machine, or if its host cannot be
    resolved, or if there is no route to it.  No packet is sent to the coordinator to determine the interface.
    """
    target = urlsplit(coordinator)
    return interface_address(target.hostname or _LOOPBACK) or f"tcp://{_LOOPBACK}:0"


def interface_address(host: str) -> str:
    """Return the address of the network interface that leads to `host`, with port 0 (any free port); "" if
    the host cannot be resolved, or if there is no route to it.  No packet is sent."""
    address = names.resolve(host)
    if not address:
        return ""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))  # any port: the route is the same
            own = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except OSError:
        return ""
    return f"tcp://[{own}]:0" if own.version == 6 else f"tcp://{own}:0"
