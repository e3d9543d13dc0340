"""Chooses the dashboard's address, a free port and the token, and lists missing packages.

    ""                  127.0.0.1 and port 7780 or, if it is in use, one of the next 19 ports
    "127.0.0.1:7780"    only this port; ":7780" and "7780" have the same meaning
    "0.0.0.0:7780"      only with `open_to_network`

Imports no packages of the `coordinator` extra, so that it can list those that are missing.
"""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from gridtrain.errors import DISK_FULL, AddressTaken, ConfigError, TransportError, disk_errors
from gridtrain.extras import install_command
from gridtrain.runtime.client.private_file import replace_private_file

HOST, PORT = "127.0.0.1", 7780
MAX_PORTS_TRIED = 20
TOKEN_FILE = "dashboard.token"
NEEDED = ("starlette", "uvicorn", "prometheus_client")
INSTALL = install_command("coordinator")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")


@dataclass(frozen=True, slots=True)
class DashboardAddress:
    """The owner's choice of address for the dashboard.

    Attributes:
        host, port: the address and port to listen on; port 0 means any free port.
        is_required: whether the owner specified the address; if so, failing to bind to it is an error.
        allows_network: whether other machines may reach the address.
        allowed_hosts: host names under which the dashboard may be opened, besides IP addresses and localhost.
    """

    host: str = HOST
    port: int = PORT
    is_required: bool = False
    allows_network: bool = False
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.allows_network and not is_loopback(self.host):
            raise ConfigError(
                f"other machines could open --dashboard {self.host}:{self.port} without encryption",
                remedy="leave it on 127.0.0.1 and use `ssh -L 7780:127.0.0.1:7780`, put a web server "
                "with TLS in front of it, or add --dashboard-open to allow this",
            )


def parse_address(
    text: str, *, open_to_network: bool = False, allowed_hosts: tuple[str, ...] = ()
) -> DashboardAddress:
    """Parse "HOST:PORT", "HOST", ":PORT", "PORT" or "".  Raises `ConfigError` for any other text."""
    plain = text.strip()
    plain = f":{plain}" if plain.isdecimal() else plain
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\s/]*)(?::(\d{1,5}))?", plain)
    if match is None or int(match[2] or PORT) > 65535:
        raise ConfigError(
            f"--dashboard {text!r} is not of the form HOST:PORT", remedy="use, for example, 127.0.0.1:7780"
        )
    host = (match[1] or HOST).strip("[]")
    return DashboardAddress(host, int(match[2] or PORT), bool(text), open_to_network, allowed_hosts)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def missing_packages() -> list[str]:
    """Return the packages of the `coordinator` extra that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def bind(address: DashboardAddress) -> socket.socket:
    """Return a socket that listens on the address.

    If the owner did not specify the address, the next ports are also tried.

    Raises:
        AddressTaken: no port is free.
        TransportError: this machine cannot listen on the address.
    """
    is_fixed = address.is_required or not address.port
    ports = range(address.port, address.port + (1 if is_fixed else MAX_PORTS_TRIED))
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    for port in ports:
        candidate = socket.socket(family, socket.SOCK_STREAM)
        try:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind((address.host, port))
            candidate.listen()  # until then, another coordinator can bind the same port
        except OSError as error:
            candidate.close()
            failure = error
        else:
            return candidate
    raise _bind_error(address, failure)


def _bind_error(address: DashboardAddress, error: OSError) -> TransportError:
    # A TransportError, unlike a ConfigError, lets a service manager start the coordinator again: the port may
    # become free, and the interface may come up later.
    what = f"the dashboard cannot listen on {address.host}, port {address.port}"
    choose = "with --dashboard HOST:PORT, or omit the dashboard with --no-dashboard"
    if error.errno == errno.EADDRINUSE:
        return AddressTaken(f"{what}: the port is taken", remedy=f"choose a free port {choose}")
    if isinstance(error, socket.gaierror):
        return TransportError(
            f"{what}: the name cannot be resolved: {error.strerror}",
            remedy=f"check the name, or choose an address of this machine {choose}",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return TransportError(
            f"{what}: no interface of this machine has that address",
            remedy=f"choose an address of this machine {choose}",
        )
    return TransportError(f"{what}: {error.strerror}", remedy=f"choose another address {choose}")


def url(bound: socket.socket) -> str:
    """Return the address to open in a browser on this machine."""
    host, port = bound.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}/" if ":" in local else f"http://{local}:{port}/"


def load_token(folder: Path) -> str:
    """Return the token from its file, which is beside the keys; create the file if it is missing.

    Anyone who can read the file can send commands.  Raises `ConfigError` if the file cannot be used, or if
    other users may read it.
    """
    path = folder / TOKEN_FILE
    if not path.exists():
        try:
            replace_private_file(path, secrets.token_urlsafe(32) + "\n")
        except OSError as error:
            remedy = "free disk space" if error.errno in DISK_FULL else "check the folder's permissions"
            raise ConfigError(f"{path} cannot be written: {error.strerror}", remedy=remedy) from None
    return _read(path)


def _read(path: Path) -> str:
    remedy = "delete the file; the next start creates a new one"
    with disk_errors(f"{path} cannot be read", remedy), open(path, "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        text = file.read(256).decode("ascii", "replace").strip()
    if mode & 0o077:
        raise ConfigError(
            f"{path} can be read by others (mode {mode:04o}), who could then remove workers", remedy=remedy
        )
    if not _TOKEN.fullmatch(text):
        raise ConfigError(f"{path} does not contain a valid token", remedy=remedy)
    return text
