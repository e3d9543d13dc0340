"""Asking a coordinator how its run stands: for `gridtrain status`, the agent, and people's scripts.

Decides what an address may look like and how long to wait for an answer.  Joins nothing: whoever
asks is no member, and changes nothing.

    StatusClient -- Hello, StatusRequest --> coordinator
                 <------- StatusReply ------
"""

from __future__ import annotations

import json
import os
import re
import time
from types import TracebackType
from typing import Any

from gridtrain._version import __version__
from gridtrain.config import DEFAULT_PORT
from gridtrain.errors import (
    ConfigError,
    CoordinatorUnreachable,
    JoinRefused,
    RemoteProtocolError,
    TransportError,
)
from gridtrain.protocol.messages import PeerId, StatusReply, StatusRequest
from gridtrain.transport.base import PeerDown, PeerUp, Received, Transport, Violation

SOFTWARE = f"gridtrain {__version__}"
MAX_TEXT = 512
_HOST = r"\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"(?:tcp://)?({_HOST})(?::(\d{{1,5}}))?")


def coordinator_address(text: str) -> str:
    """ "tcp://host:port" from that, from "host:port", or from "host" (port 7700).

    Raises `ConfigError` for anything else.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 1 <= (port := int(match[2] or DEFAULT_PORT)) <= 65535:
        raise ConfigError(
            f"an address is tcp://host:port, got {text!r}",
            remedy=f"write for instance tcp://192.168.1.20:{DEFAULT_PORT}; the coordinator prints its own",
        )
    return f"tcp://{match[1]}:{port}"


class StatusClient:
    """A connection to a coordinator that can be asked again and again; a context manager.

    Args:
        address: any form that `coordinator_address` takes.
        transport: to ask over; it is closed at the end.  None: ZeroMQ.

    Raises:
        ConfigError: `address` has no known form.
    """

    def __init__(self, address: str, transport: Transport | None = None) -> None:
        if transport is None:
            from gridtrain.transport.zeromq import ZeroMQTransport  # only who asks over TCP loads it

            address = coordinator_address(address)
            transport = ZeroMQTransport(os.urandom(32), SOFTWARE)
        self.address = address
        self._transport = transport
        self._peer: PeerId | None = None
        try:
            transport.dial(None, address)
        except TransportError as error:
            transport.close()
            raise _unreachable(address, error.reason) from None

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def ask(self, timeout_s: float) -> dict[str, Any]:
        """The coordinator's picture of the run: `Membership.snapshot` and what the daemon adds.

        Texts in it are printable and at most `MAX_TEXT` long.

        Raises:
            CoordinatorUnreachable: no answer within `timeout_s`.
            JoinRefused: it speaks another version of the protocol (code "version").
            RemoteProtocolError: who answers is no coordinator.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._peer is not None and self._transport.connected(self._peer):
            self._request(self._peer)
        while (left_s := deadline_s - time.monotonic()) > 0:
            for event in self._transport.poll(left_s):
                match event:
                    case PeerUp(peer):
                        self._peer = peer
                        self._request(peer)
                    case PeerDown():
                        self._peer = None
                    case Received(_, StatusReply(payload)):
                        return _parsed(self.address, bytes(payload))
                    case Violation(_, reason):
                        raise _refused(self.address, reason)
        what = "greeted, but did not answer" if self._peer is not None else "did not answer"
        raise _unreachable(self.address, f"it {what} within {timeout_s:g} s")

    def _request(self, peer: PeerId) -> None:
        try:
            self._transport.send(peer, StatusRequest())
        except TransportError:
            self._peer = None  # PeerDown follows, then a new PeerUp or the deadline


def fetch_status(address: str, timeout_s: float) -> dict[str, Any]:
    """Ask once, over TCP.  See `StatusClient.ask` for what it returns and raises."""
    with StatusClient(address) as client:
        return client.ask(timeout_s)


def _parsed(address: str, payload: bytes) -> dict[str, Any]:
    try:
        picture = _printable(json.loads(payload))
    except (ValueError, RecursionError):
        picture = None
    if not isinstance(picture, dict):
        raise RemoteProtocolError(
            f"{address} answered with {len(payload)} bytes that are no status",
            remedy="check that the address is the coordinator's",
        )
    return picture


def _printable(value: Any) -> Any:
    """The same with texts, workers' names among them, as they may reach a terminal."""
    match value:
        case str():
            return "".join(letter if letter.isprintable() else " " for letter in value[:MAX_TEXT])
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case _:
            return value


def _refused(address: str, reason: str) -> JoinRefused | RemoteProtocolError:
    if "protocol" in reason:
        return JoinRefused("version", f"{address}: {reason}")
    return RemoteProtocolError(
        f"{address} answered with something else: {reason}",
        remedy="check that the address is the coordinator's",
    )


def _unreachable(address: str, reason: str) -> CoordinatorUnreachable:
    return CoordinatorUnreachable(
        f"no coordinator can be reached at {address}: {reason}",
        remedy="check the address and that `gridtrain coordinator` is running there, "
        "and that no firewall is in between",
    )
