"""Parses the addresses that people write.  Host names are not resolved."""

from __future__ import annotations

import re

from gridtrain.config import DEFAULT_PORT
from gridtrain.errors import ConfigError

_HOST = r"\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"(?:tcp://)?({_HOST})(?::(\d{{1,5}}))?")


def parse_coordinator_address(text: str) -> str:
    """ "tcp://host:port" from the same, from "host:port", or from "host" (port 7700).

    Raises `ConfigError` for anything else.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= (port := int(match[2] or DEFAULT_PORT)) <= 65535:
        raise ConfigError(
            f"an address is tcp://host:port, got {text!r}",
            remedy=f"write for instance tcp://192.168.1.20:{DEFAULT_PORT}; the coordinator prints its own",
        )
    return f"tcp://{match[1]}:{port}"


def parse_explicit_address(option: str, text: str, *, any_port: bool = False) -> str:
    """As `parse_coordinator_address`, of an address that must have both host and port.

    Args:
        option: the name of the option, for messages.
        any_port: accept port 0, any free one.
    """
    plain = text.strip()
    match = _ADDRESS.fullmatch(plain)
    if plain.removeprefix(":").isdigit():
        port = plain.removeprefix(":")
        raise ConfigError(
            f"{option} {text} has no host",
            remedy=f"write tcp://0.0.0.0:{port} for all, or tcp://127.0.0.1:{port} for this machine only",
        )
    if match is not None and match[2] is None:
        raise ConfigError(f"{option} {text} has no port", remedy=f"write tcp://{match[1]}:{DEFAULT_PORT}")
    if plain.removeprefix("tcp://").count(":") > 1 and "[" not in plain:
        raise ConfigError(
            f"{option} {text} is not tcp://host:port",
            remedy=f"write an IPv6 address in brackets: tcp://[2001:db8::1]:{DEFAULT_PORT}",
        )
    if match is None or match[2] is None or not (0 if any_port else 1) <= int(match[2]) <= 65535:
        raise ConfigError(
            f"{option} has to be tcp://host:port, got {text!r}",
            remedy=f"write for instance tcp://192.168.1.20:{DEFAULT_PORT}",
        )
    return f"tcp://{match[1]}:{int(match[2])}"
