"""Sends requests (status, enrolment, commands) to a coordinator, and reports why it does not answer.

A client is not a member of the run.

    CoordinatorClient -- StatusRequest | Enrol | Invite | RemoveWorker | Unban | BundleRequest --> coordinator
                      <---- StatusReply | Enrolled | OperatorReply | BundleBlock | Refused -------
"""

from __future__ import annotations

import errno
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from gridtrain._version import SOFTWARE
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
    MTU_REMEDY,
    VERSION,
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
    VersionMismatch,
)
from gridtrain.network.transport.zmq import name_lookup
from gridtrain.quantities import make_printable

MAX_TEXT = 512
MAX_NUMBER = 1e18
DENIED = "denied"
"""Refusal code for a key that the coordinator does not admit, or no longer admits."""
CONNECT_S = 1.0
"""Time limit for checking whether a program listens on an address that has not answered."""
_NO_ROUTE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL)


class CoordinatorClient:
    """A connection to a coordinator for requests and replies.  Use it as a context manager.

    Args:
        address: the coordinator's address, in any form that `parse_coordinator_address` accepts.
        key: the coordinator's public key, which authenticates the replies.
        identity: the key pair of this client.
        encrypted: whether to encrypt the connection; False only for a coordinator that was started with
            --unencrypted.
        transport: the transport to use, which is closed on exit; None for a new ZeroMQ transport.

    Raises:
        ConfigError: `address` is invalid or cannot be dialled.
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
                ZeroMQTransport,  # imported only if needed
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

    def __exit__(self, *error: object) -> None:
        self._transport.close()

    def status(self, timeout_s: float) -> dict[str, Any]:
        """Request and return the status of the run: `Membership.status` and fields that the daemon adds.

        Strings in the status are printable and have at most `MAX_TEXT` characters.  Raises the same errors as
        `ask`.
        """
        reply = self.ask(StatusRequest(), timeout_s)
        if not isinstance(reply, StatusReply):
            raise RemoteProtocolError(
                f"{self.address} answered a status request with {type(reply).__name__}",
                remedy="use the same version of gridtrain as the coordinator",
            )
        return _parse_status(self.address, bytes(reply.payload))

    def ask(
        self, question: Message, timeout_s: float
    ) -> Enrolled | OperatorReply | StatusReply | BundleBlock:
        """Send a request and return the reply.  The request is sent again after each reconnection.

        Raises:
            CoordinatorUnreachable: no reply arrived within `timeout_s`.
            JoinRefused: the coordinator refuses the request (the error has the code and reason), does not
                know this key (code "denied"), or uses another version of the protocol (code "version").
            RemoteProtocolError: the program at the address is not a coordinator.
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
                    case VersionMismatch(_, reason):
                        raise JoinRefused(
                            VERSION,
                            f"{self.address}: {reason}",
                            remedy="install the coordinator's version of gridtrain",
                        )
                    case TransportViolation(_, reason):
                        raise RemoteProtocolError(
                            f"{self.address} sent an invalid response: {reason}",
                            remedy="check that the address is the coordinator's address",
                        )
        if is_connected:
            raise CoordinatorUnreachable(
                f"the coordinator at {self.address} accepted the connection, but did not answer within "
                f"{timeout_s:g} s",
                remedy=f"check whether it is overloaded; {MTU_REMEDY}",
            )
        if (unresolved := name_error(self.address)) is not None:
            raise unresolved
        reason = f"it did not answer within {timeout_s:g} s"
        if self._is_tcp:
            error = tcp_error(self.address)
            if error is None:
                raise _wrong_peer_error(self.address, timeout_s)
            if error.errno in (*_NO_ROUTE, errno.EHOSTUNREACH):
                reason += f": {error.strerror}"
            if error.errno in _NO_ROUTE:
                raise _no_route_error(self.address, reason)
        raise _unreachable_error(self.address, reason)

    def _send(self, question: Message) -> bool:
        try:
            self._transport.send(self._key, question)
        except TransportError:
            return False  # the request is sent again at the next PeerUp, if it comes before the deadline
        return True


def allow_only(key: PeerId) -> AccessPolicy:
    """Return an access policy that admits only this key."""
    return lambda other: ConnectionRole.MEMBER if other == key else ConnectionRole.STRANGER


def name_error(address: str) -> CoordinatorUnreachable | None:
    """Return the error for an address with a host name that could not be resolved; None for all others."""
    problem = name_lookup.names.problem(address)
    if not problem:
        return None
    return CoordinatorUnreachable(
        f"the coordinator at {address} cannot be reached: {problem}",
        remedy="check this machine's network and its name server (DNS), or ask the run's owner for an "
        "invitation with a numeric address",
    )


def tcp_error(address: str) -> OSError | None:
    """Return why no TCP connection can be opened; None if a connection was opened.

    If a host has several addresses, the error of an address to which there is a route is preferred.
    """
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_S, all_errors=True).close()
    except ExceptionGroup as group:  # an `OSError` for each address
        errors = [error for error in group.exceptions if isinstance(error, OSError)]
        return min(errors, key=lambda error: error.errno in _NO_ROUTE)
    except (OSError, ValueError) as error:  # ValueError: a host name that cannot be encoded
        return error if isinstance(error, OSError) else OSError(str(error))
    return None


def _parse_status(address: str, payload: bytes) -> dict[str, Any]:
    try:
        status = _printable(json.loads(payload))
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise RemoteProtocolError(
            f"{address} answered with {len(payload)} bytes, which are not a valid status",
            remedy="check that the address is the coordinator's address",
        )
    return status


def _printable(value: Any) -> Any:
    """Return a copy of `value` in which all strings (such as workers' names) are safe to print."""
    match value:
        case str():
            return make_printable(value[:MAX_TEXT])
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case int() | float() if not -MAX_NUMBER <= value <= MAX_NUMBER:
            return None  # the number is NaN or too large to be displayed
        case _:
            return value


def _wrong_peer_error(address: str, timeout_s: float) -> CoordinatorUnreachable:
    """Return the error for an address that accepts connections but does not answer.

    A handshake is refused without a reason, so the error can only list the possible causes.
    """
    return CoordinatorUnreachable(
        f"a program listens on {address}, but it did not answer within {timeout_s:g} s; it may be a "
        "coordinator with another key or some other program, or the connection may be very slow",
        remedy="if the coordinator was set up again or now belongs to another run, ask the run's owner for a "
        "new invitation",
    )


def _no_route_error(address: str, reason: str) -> CoordinatorUnreachable:
    """Return the error for an address to which this machine has no route."""
    remedy = "check this machine's network, and whether the address belongs to another network"
    if "[" in address:
        remedy += "; enable IPv6, or ask the run's owner for an invitation with an IPv4 address"
    return CoordinatorUnreachable(f"the coordinator at {address} cannot be reached: {reason}", remedy=remedy)


def _unreachable_error(address: str, reason: str) -> CoordinatorUnreachable:
    return CoordinatorUnreachable(
        f"the coordinator at {address} cannot be reached: {reason}",
        remedy="check that the address is correct, that `gridtrain coordinator` is running there, and that "
        "no firewall blocks the connection",
    )
