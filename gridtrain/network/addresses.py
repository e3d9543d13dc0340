"""Parses addresses (host, port) in the configuration and on the command line; resolves no host names."""

from __future__ import annotations

import re
from contextlib import suppress
from ipaddress import ip_address

from gridtrain.config import DEFAULT_PORT
from gridtrain.errors import ConfigError

_HOST = r"\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"(?:tcp://)?({_HOST})(?::(\d{{1,5}}))?")


def parse_coordinator_address(text: str, default_port: int = DEFAULT_PORT) -> str:
    """Return `text` as "tcp://host:port".

    "tcp://" and the port are optional in `text`; `default_port` replaces a missing port.

    Raises:
        ConfigError: `text` is not an address.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= (port := int(match[2] or default_port)) <= 65535:
        raise ConfigError(
            f"an address must be tcp://host:port, got {text!r}",
            remedy="write the address that the coordinator prints, such as "
            f"tcp://192.168.1.20:{DEFAULT_PORT}",
        )
    return f"tcp://{match[1]}:{port}"


def check_reachable(option: str, address: str) -> None:
    """Raise `ConfigError` if the host in `address` ("tcp://host:port") stands for all interfaces of this
    machine, so that other machines cannot connect to `address`."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        if ip_address(host).is_unspecified:
            raise ConfigError(
                f"{option} {address} is not an address that other machines can connect to",
                remedy=f"omit {option}, or write a host name or address of this machine",
            )


def parse_explicit_address(option: str, text: str, *, any_port: bool = False) -> str:
    """Return `text`, which must have both a host and a port, as "tcp://host:port".

    Args:
        option: the name of the option, for error messages.
        any_port: whether to accept port 0, which stands for any free port.

    Raises:
        ConfigError: `text` is not an address with a host and a port.
    """
    plain = text.strip()
    match = _ADDRESS.fullmatch(plain)
    if plain.removeprefix(":").isdigit():
        port = plain.removeprefix(":")
        raise ConfigError(
            f"{option} {text} has no host",
            remedy=f"write tcp://0.0.0.0:{port} for all interfaces, "
            f"or tcp://127.0.0.1:{port} for this machine only",
        )
    if match is not None and match[2] is None:
        raise ConfigError(f"{option} {text} has no port", remedy=f"write tcp://{match[1]}:{DEFAULT_PORT}")
    rest = plain.removeprefix("tcp://")
    if rest.count(":") > 1 and not any(sign in rest for sign in "[/"):
        raise ConfigError(
            f"{option} {text} is not tcp://host:port",
            remedy=f"write an IPv6 address in brackets: tcp://[2001:db8::1]:{DEFAULT_PORT}",
        )
    if match is None or match[2] is None or not (0 if any_port else 1) <= int(match[2]) <= 65535:
        raise ConfigError(
            f"{option} must be tcp://host:port, got {text!r}",
            remedy=f"write an address such as tcp://192.168.1.20:{DEFAULT_PORT}",
        )
    return f"tcp://{match[1]}:{int(match[2])}"
