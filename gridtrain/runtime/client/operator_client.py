"""Operator commands to the coordinator of this machine, for `gridtrain invite`, `kick` and scripts.

A command is authorized by the key in `operator.key`, so by the permission to read that file.

    state folder --find--> CoordinatorEndpoint --> OperatorClient -- Invite RemoveWorker Unban --> coordinator
                                                                  <--- OperatorReply | Refused ---

A coordinator listens only to the latest connection of a key, and all commands of this machine use one key.
So each question opens a connection, and processes take turns (a lock on the key's file).
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from gridtrain.core.group.invitation import RUN_NAME, Invitation
from gridtrain.core.messages import Invite, OperatorReply, PeerId, RemoveWorker, Unban
from gridtrain.errors import ConfigError, JoinRefused, RemoteProtocolError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.client.coordinator_client import DENIED, CoordinatorClient
from gridtrain.runtime.client.endpoint_file import CONTACT_FILE, OPERATOR_KEY, EndpointFile
from gridtrain.runtime.client.worker_naming import state_directory

Answer = TypeVar("Answer")

ANSWER_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05
"""Interval at which a file is looked for that a starting coordinator has not written yet."""


@dataclass(frozen=True, slots=True)
class CoordinatorEndpoint:
    """How an operator reaches its coordinator.

    Attributes:
        address: that workers use.
        local_address: that this machine dials.
        key_file: of the operator's key, whose users take turns; None: there are no other users.
    """

    address: str
    local_address: str
    coordinator: PeerId
    run: str
    encrypted: bool
    operator: Identity
    key_file: Path | None = None

    @classmethod
    def find(
        cls, run: str = "default", state: Path | None = None, *, wait_s: float = 0.0
    ) -> CoordinatorEndpoint:
        """Read the state folder of a run whose coordinator runs on this machine.

        Args:
            state: the folder; None: the default one of `run`.
            wait_s: how long to wait for a coordinator that is starting.

        Raises:
            ConfigError: no coordinator runs there, it coordinates another run, or a file cannot be read.
        """
        if not RUN_NAME.fullmatch(run):
            raise ConfigError(
                f"{run!r} cannot be a run's name", remedy="use the name given to the coordinator"
            )
        folder = state if state is not None else state_directory(run)
        deadline_s = time.monotonic() + wait_s
        while (found := _read_endpoint(folder)) is None:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise _not_running_error(folder, run)
            time.sleep(min(left_s, POLL_INTERVAL_S))
        if found.run != run and state is None:
            raise ConfigError(
                f'{folder / CONTACT_FILE} is of the run "{found.run}", not "{run}"',
                remedy=f"name it: --run {found.run}, or its folder with --state",
            )
        key_file = folder / OPERATOR_KEY
        operator = Identity.read(key_file)
        return cls(
            found.address, found.here, found.coordinator, found.run, found.encrypted, operator, key_file
        )


class OperatorClient:
    """Sends commands with the operator's key; a context manager.

    Args:
        transport: with the operator's identity; closed at the end.  None: ZeroMQ, connected for each
            question,
            while no other program of this machine asks one.

    Raises `ConfigError`, `CoordinatorUnreachable`.
    """

    def __init__(self, endpoint: CoordinatorEndpoint, transport: Transport | None = None) -> None:
        self.endpoint = endpoint
        self._client = None if transport is None else self._connected(transport)

    def _connected(self, transport: Transport | None = None) -> CoordinatorClient:
        there = self.endpoint
        return CoordinatorClient(
            there.local_address,
            there.coordinator,
            there.operator,
            encrypted=there.encrypted,
            transport=transport,
        )

    def _ask(self, question: Callable[[CoordinatorClient], Answer], timeout_s: float) -> Answer:
        with _explain_refusal(self.endpoint):
            if self._client is not None:
                return question(self._client)
            with _operator_lock(self.endpoint.key_file, timeout_s), self._connected() as client:
                return question(client)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.__exit__(kind, error, trace)

    def order(self, message: Invite | RemoveWorker | Unban, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        """Have a command carried out; returns the coordinator's reply, for people.

        Raises:
            CoordinatorUnreachable: no answer within `timeout_s`.
            JoinRefused: it refuses, with its code and reason; code "denied": it does not know this key.
            RemoteProtocolError: what answers is not a coordinator.
        """
        reply = self._ask(lambda client: client.ask(message, timeout_s), timeout_s)
        if not isinstance(reply, OperatorReply):
            raise RemoteProtocolError(
                f"the coordinator answered a command with {type(reply).__name__}",
                remedy="use the same version of gridtrain for the coordinator and this program",
            )
        return reply.text

    def status(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """See `CoordinatorClient.status`.  Raises as `order`."""
        return self._ask(lambda client: client.status(timeout_s), timeout_s)

    def invite(self, uses: int, expires_s: float, address: str = "") -> Invitation:
        """A new invitation.  Its token is created here, and is only in the invitation.

        Raises as `order`; `ConfigError` for an address that does not fit.
        """
        there = self.endpoint
        token = secrets.token_bytes(32)
        invitation = Invitation(
            address or there.address, there.coordinator, token, there.run, there.encrypted
        )
        self.order(Invite(Identity.from_secret(token).public, uses, expires_s))
        return invitation

    def withdraw(self, invitation: Invitation) -> str:
        """Invalidate an invitation.  Raises as `order`."""
        return self.order(Invite(Identity.from_secret(invitation.token).public, 1, 0.0))


@contextlib.contextmanager
def _operator_lock(key_file: Path | None, timeout_s: float) -> Iterator[None]:
    """Context manager: holds the lock of the key's file; after `timeout_s` it continues without."""
    if key_file is None:
        yield
        return
    deadline_s = time.monotonic() + timeout_s
    with key_file.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed
                break
            except BlockingIOError:  # another process holds it
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    break
                time.sleep(min(left_s, POLL_INTERVAL_S))
            except OSError:  # this file system has no locks
                break
        yield


@contextlib.contextmanager
def _explain_refusal(endpoint: CoordinatorEndpoint) -> Iterator[None]:
    """Context manager: a refused operator's key gets its own remedy."""
    try:
        yield
    except JoinRefused as refusal:
        if refusal.code != DENIED:
            raise
        raise JoinRefused(
            DENIED,
            f"the coordinator at {endpoint.local_address} does not know the key in {OPERATOR_KEY}",
            remedy="restart the coordinator: it reads the file when it starts",
        ) from None


def _read_endpoint(folder: Path) -> EndpointFile | None:
    try:
        return EndpointFile.read(folder)
    except FileNotFoundError:
        return None


def _not_running_error(folder: Path, run: str) -> ConfigError:
    option = "" if run == "default" else f" --run {run}"
    return ConfigError(
        f"no coordinator is running: {folder / CONTACT_FILE} does not exist",
        remedy=f"start it on this machine, as this user: gridtrain coordinator{option}; "
        "or name the folder with its journal: --state FOLDER",
    )
