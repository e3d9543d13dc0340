"""Asks a coordinator: for the status of its run, for enrolment, or to carry out an operator's command.

A client is not a member of the run.

    CoordinatorClient -- Hello, StatusRequest | Enrol | Invite | Expel | Pardon | BundleAsk --> coordinator
                      <------- StatusReply | Enrolled | Done | BundleBlock | Refused ----------
"""

from __future__ import annotations

import json
import socket
import time
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from gridtrain._version import __version__
from gridtrain.core.messages import (
    BundleBlock,
    Enrolled,
    Message,
    OperatorReply,
    PeerId,
    Refused,
    StatusReply,
    StatusRequest,
)
from gridtrain.errors import (
    ConfigError,
    CoordinatorUnreachable,
    JoinRefused,
    RemoteProtocolError,
    TransportError,
)
from gridtrain.network.addresses import parse_coordinator_address as parse_coordinator_address
from gridtrain.network.addresses import parse_explicit_address as parse_explicit_address
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import (
    AccessPolicy,
    ConnectionDenied,
    ConnectionRole,
    PeerUp,
    Received,
    Transport,
    TransportViolation,
)

SOFTWARE = f"gridtrain {__version__}"
MAX_TEXT = 512
MAX_NUMBER = 1e18
DENIED = "denied"
"""Refusal code for a key that the coordinator does not know, or no longer knows."""
CONNECT_S = 1.0
"""Time-out when checking whether anything listens at an address that has not answered."""


class CoordinatorClient:
    """A connection to a coordinator for questions and answers; a context manager.

    Args:
        address: any form that `parse_coordinator_address` accepts.
        key: the coordinator's public key; nobody else can answer.
        identity: the key pair to show.
        encrypted: False only for a coordinator that was started with --unencrypted.
        transport: closed at the end.  None: ZeroMQ.

    Raises:
        ConfigError: `address` has no known form, or cannot be dialled.
    """

    def __init__(
        self,
        address: str,
        key: PeerId,
        identity: Identity,
        *,
        encrypted: bool = True,
        transport: Transport | None = None,
    ) -> None:
        self._is_tcp = transport is None
        if transport is None:
            from gridtrain.network.transport.zmq.zeromq_transport import (
                ZeroMQTransport,  # loaded only for TCP
            )

            address = parse_coordinator_address(address)
            transport = ZeroMQTransport(
                identity, SOFTWARE, gate=allow_only(key), encrypted=encrypted, plain_anywhere=not encrypted
            )
        self.address = address
        self._key = key
        self._transport = transport
        try:
            transport.dial(key, address)
        except TransportError as error:
            transport.close()
            raise ConfigError(error.reason, remedy=error.remedy) from None

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def status(self, timeout_s: float) -> dict[str, Any]:
        """The status of the run: `Membership.snapshot` and what the daemon adds.

        Texts in it are printable and at most `MAX_TEXT` long.  Raises as `ask`.
        """
        reply = self.ask(StatusRequest(), timeout_s)
        if not isinstance(reply, StatusReply):
            raise RemoteProtocolError(
                f"{self.address} answered a status request with {type(reply).__name__}",
                remedy="use the coordinator's own version of gridtrain",
            )
        return _parse_status(self.address, bytes(reply.payload))

    def ask(
        self, question: Message, timeout_s: float
    ) -> Enrolled | OperatorReply | StatusReply | BundleBlock:
        """Send `question`, and again after a reconnect, until it is answered.

        Raises:
            CoordinatorUnreachable: no answer within `timeout_s`.
            JoinRefused: it refuses (with its code and reason), does not know this key (code "denied"), or has
                another version of the protocol (code "version").
            RemoteProtocolError: what answers is not a coordinator.
        """
        deadline_s = time.monotonic() + timeout_s
        sent = self._transport.connected(self._key) and self._send(question)
        is_connected = sent
        while (left_s := deadline_s - time.monotonic()) > 0:
            for event in self._transport.poll(left_s):
                match event:
                    case PeerUp():
                        is_connected = True
                        self._send(question)
                    case Received(_, Enrolled() | OperatorReply() | StatusReply() | BundleBlock() as answer):
                        return answer
                    case Received(_, Refused(code, reason, remedy)):
                        raise JoinRefused(code, reason, remedy=remedy)
                    case ConnectionDenied():
                        raise JoinRefused(
                            DENIED,
                            f"the coordinator at {self.address} denies access to this key",
                            remedy="ask the run's owner for a new invitation",
                        )
                    case TransportViolation(_, reason):
                        raise _refused_error(self.address, reason)
        if is_connected:
            raise _unreachable_error(
                self.address, f"it accepted the connection, but did not answer within {timeout_s:g} s"
            )
        if self._is_tcp and _accepts_tcp(self.address):
            raise _wrong_peer_error(self.address, timeout_s)
        raise _unreachable_error(self.address, f"it did not answer within {timeout_s:g} s")

    def _send(self, question: Message) -> bool:
        try:
            self._transport.send(self._key, question)
        except TransportError:
            return False  # PeerDown follows, then a new PeerUp or the deadline
        return True


def allow_only(key: PeerId) -> AccessPolicy:
    """An access policy for this key alone."""
    return lambda other: ConnectionRole.MEMBER if other == key else ConnectionRole.STRANGER


def _accepts_tcp(address: str) -> bool:
    """Whether the port accepts connections: a program listens, and no firewall is in between."""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _parse_status(address: str, payload: bytes) -> dict[str, Any]:
    try:
        status = _printable(json.loads(payload))
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise RemoteProtocolError(
            f"{address} answered with {len(payload)} bytes that are not a status",
            remedy="check that the address is the coordinator's",
        )
    return status


def _printable(value: Any) -> Any:
    """The same with texts (such as workers' names) made safe for a terminal."""
    match value:
        case str():
            return "".join(letter if letter.isprintable() else " " for letter in value[:MAX_TEXT])
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case int() | float() if not -MAX_NUMBER <= value <= MAX_NUMBER:
            return None  # NaN, or too large to be shown
        case _:
            return value


def _refused_error(address: str, reason: str) -> JoinRefused | RemoteProtocolError:
    if "protocol" in reason:
        return JoinRefused(
            "version", f"{address}: {reason}", remedy="install the gridtrain that the coordinator has"
        )
    return RemoteProtocolError(
        f"{address} answered with something else: {reason}",
        remedy="check that the address is the coordinator's",
    )


def _wrong_peer_error(address: str, timeout_s: float) -> CoordinatorUnreachable:
    """Unknown keys are refused in the handshake without a reason, so nothing more can be known."""
    return CoordinatorUnreachable(
        f"something listens at {address}, but did not answer within {timeout_s:g} s: a coordinator with "
        "another key, another program, or a very slow connection",
        remedy="if another run is coordinated there now, or this one was set up again, ask its owner for a "
        "new invitation",
    )


def _unreachable_error(address: str, reason: str) -> CoordinatorUnreachable:
    return CoordinatorUnreachable(
        f"no coordinator can be reached at {address}: {reason}",
        remedy="check the address and that `gridtrain coordinator` is running there, "
        "and that no firewall is in between",
    )
