"""Finds the coordinator on this machine and sends it the owner's commands (invite, kick, ban).

Commands are authorized with the key in `operator.key`, so every user who can read this file is an operator.

    state folder --find--> CoordinatorEndpoint --> OperatorClient -- Invite RemoveWorker Unban --> coordinator
                                                                  <--- OperatorReply | Refused ---

A coordinator keeps only the latest connection of each key, and all commands on this machine use the same key.
Each request therefore opens its own connection, and holds a lock on the key's file so that requests from
different processes are sent one after the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gridtrain.core.group.invitation import RUN_NAME, Invitation
from gridtrain.core.messages import EndRun, Invite, OperatorReply, RemoveWorker, Unban
from gridtrain.errors import ConfigError, CoordinatorUnreachable, JoinRefused, RemoteProtocolError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.coordinator_client import DENIED, CoordinatorClient, tcp_error
from gridtrain.runtime.client.endpoint_file import CONTACT_FILE, OPERATOR_KEY, EndpointFile
from gridtrain.runtime.client.worker_defaults import state_directory

Answer = TypeVar("Answer")

ANSWER_TIMEOUT_S = 5.0
MAX_LISTED_RUNS = 5
RESTART_REMEDY = (
    "restart it with `gridtrain coordinator`, typed in the folder of the run's run.toml or with the "
    "same --run or --state; a run that has finished cannot be restarted: its first worker's log says where "
    "the model is, and docs/operations.md how to train it further"
)
POLL_INTERVAL_S = 0.05
"""Interval between two checks for the endpoint file of a coordinator that is starting, or for the lock of the
operator's key."""


@dataclass(frozen=True, slots=True)
class CoordinatorEndpoint:
    """The data that an operator needs to connect to the coordinator.

    Attributes:
        file: the coordinator's addresses and key.
        operator: the operator's key pair.
        key_file: the path of the file with the operator's key, which is locked during a request; None if no
            other process uses the key.
    """

    file: EndpointFile
    operator: Identity
    key_file: Path | None = None

    @classmethod
    def find(
        cls,
        run: str = "default",
        state: Path | None = None,
        *,
        wait_s: float = 0.0,
        say: Callable[[str], None] | None = None,
    ) -> CoordinatorEndpoint:
        """Read the endpoint of a coordinator on this machine from the run's state folder.

        Args:
            run: the run's name.
            state: the state folder; None for the default folder of `run`.
            wait_s: the time to wait for a coordinator that is starting.
            say: called once, before the wait, with a message that explains the wait.

        Raises:
            CoordinatorUnreachable: no coordinator is running.
            ConfigError: `run` is not a valid name, the coordinator belongs to another run, or a file cannot
                be read.
        """
        if not RUN_NAME.fullmatch(run):
            raise ConfigError(
                f"{run!r} is not a valid run name",
                remedy="use the name that the coordinator was started with",
            )
        folder = state if state is not None else state_directory(run)
        deadline_s = time.monotonic() + wait_s
        while (found := _read_endpoint(folder)) is None or EndpointFile.is_abandoned(folder):
            if (left_s := deadline_s - time.monotonic()) <= 0:
                break
            if say is not None:
                say(_describe_wait(run, state, wait_s))
                say = None
            time.sleep(min(left_s, POLL_INTERVAL_S))
        if found is None:
            raise _not_running_error(folder, run, state)
        if found.run != run and state is None:
            raise ConfigError(
                f'{folder / CONTACT_FILE} belongs to the run "{found.run}", not to "{run}"',
                remedy=f"use --run {found.run}, or specify the state folder with --state",
            )
        key_file = folder / OPERATOR_KEY
        lost = f"restart the coordinator, which creates {OPERATOR_KEY}"
        return cls(found, Identity.read(key_file, lost), key_file)


class OperatorClient:
    """Sends commands with the operator's key.

    Each request opens a new connection, and requests from other programs on this machine wait until that
    connection is closed.

    Args:
        endpoint: the coordinator and the operator's key.
    """

    def __init__(self, endpoint: CoordinatorEndpoint) -> None:
        self.endpoint = endpoint
        self._address = ""  # at which the latest request was answered

    def _ask(self, question: Callable[[CoordinatorClient], Answer], timeout_s: float) -> Answer:
        there, operator = self.endpoint.file, self.endpoint.operator
        address, self._address = self._address or _find_listener(there) or there.here, ""
        with (
            _explain_errors(self.endpoint),
            _operator_lock(self.endpoint.key_file, timeout_s),
            CoordinatorClient(address, there.coordinator, operator, encrypted=there.encrypted) as client,
        ):
            answer = question(client)
        self._address = address
        return answer

    def order(
        self, message: Invite | RemoveWorker | Unban | EndRun, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> str:
        """Send a command; return the text of the coordinator's reply, to be displayed.

        Raises:
            CoordinatorUnreachable: no reply arrived within `timeout_s`.
            JoinRefused: the coordinator refuses the command (the error has the code and reason), or does not
                know this key (code "denied").
            RemoteProtocolError: the program at the address is not a coordinator.
        """
        reply = self._ask(lambda client: client.ask(message, timeout_s), timeout_s)
        if not isinstance(reply, OperatorReply):
            raise RemoteProtocolError(
                f"the coordinator answered a command with {type(reply).__name__}",
                remedy="use the same version of gridtrain for the coordinator and this program",
            )
        return reply.text

    def status(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Return the status of the run.  See `CoordinatorClient.status`.

        Raises the same errors as `order`.
        """
        return self._ask(lambda client: client.status(timeout_s), timeout_s)

    def invite(self, uses: int, expires_s: float, address: str = "") -> Invitation:
        """Create an invitation.

        Only the invitation contains the secret token; the coordinator receives the token's public key.

        Args:
            uses: the maximum number of workers that the invitation admits.
            expires_s: the time in seconds until the invitation expires.
            address: the coordinator's address in the invitation; "" for the address that workers use.

        Raises the same errors as `order`, and `ConfigError` if the address is invalid.
        """
        there = self.endpoint.file
        token = secrets.token_bytes(32)
        invitation = Invitation(
            address or there.address, there.coordinator, token, there.run, there.encrypted
        )
        self.order(Invite(Identity.from_secret(token).public, uses, expires_s))
        return invitation

    def withdraw(self, invitation: Invitation) -> str:
        """Invalidate an invitation, and return the text of the coordinator's reply.

        Raises the same errors as `order`.
        """
        return self.order(Invite(Identity.from_secret(invitation.token).public, 1, 0.0))


@contextlib.contextmanager
def _operator_lock(key_file: Path | None, timeout_s: float) -> Iterator[None]:
    """Return a context manager that holds the lock on the key's file.

    If the lock cannot be acquired within `timeout_s`, the context is entered without the lock.
    """
    if key_file is None:
        yield
        return
    deadline_s = time.monotonic() + timeout_s
    with key_file.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed
                break
            except BlockingIOError:  # another process holds the lock
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    break
                time.sleep(min(left_s, POLL_INTERVAL_S))
            except OSError:  # the file system does not support locks
                break
        yield


@contextlib.contextmanager
def _explain_errors(endpoint: CoordinatorEndpoint) -> Iterator[None]:
    """Return a context manager that raises more specific errors if the coordinator does not know the
    operator's key, or if a coordinator on this machine is not running or does not answer."""
    try:
        yield
    except CoordinatorUnreachable as error:
        folder = endpoint.key_file.parent if endpoint.key_file is not None else None
        is_locked = EndpointFile.is_locked(folder) if folder is not None else None
        is_listening = _find_listener(endpoint.file) is not None
        if is_locked and is_listening:
            process = f"process {endpoint.file.pid}, " if endpoint.file.pid else ""
            raise CoordinatorUnreachable(
                f"the coordinator ({process}{folder}) is running but does not answer", remedy="see its log"
            ) from None
        if is_locked is not False:
            if is_listening:
                raise
            tried = ", ".join(endpoint.file.local_addresses)
            raise CoordinatorUnreachable(f"{error.reason} (tried: {tried})", remedy=error.remedy) from None
        raise CoordinatorUnreachable(
            f'the coordinator of the run "{endpoint.file.run}", {endpoint.file.address}, is not running on '
            "this machine",
            remedy=RESTART_REMEDY,
        ) from None
    except JoinRefused as refusal:
        if refusal.code != DENIED:
            raise
        raise JoinRefused(
            DENIED,
            f"the coordinator at {endpoint.file.here} does not know the key in {OPERATOR_KEY}",
            remedy="restart the coordinator, which reads the file when it starts",
        ) from None


def _find_listener(file: EndpointFile) -> str | None:
    """Return the first of the coordinator's addresses on which a program listens; None if there is none."""
    return next((address for address in file.local_addresses if tcp_error(address) is None), None)


def _read_endpoint(folder: Path) -> EndpointFile | None:
    try:
        return EndpointFile.read(folder)
    except FileNotFoundError:
        return None


def _describe_wait(run: str, state: Path | None, wait_s: float) -> str:
    if state is not None:
        return f"waiting up to {wait_s:g} s for a coordinator in {state}"
    return (
        f'waiting up to {wait_s:g} s for a coordinator of the run "{run}" on this machine (for another run, '
        "type the command in the folder of its run.toml, or name the run with --run)"
    )


def _not_running_error(folder: Path, run: str, state: Path | None) -> CoordinatorUnreachable:
    if (folder / OPERATOR_KEY).exists():
        return CoordinatorUnreachable(
            f"the coordinator whose state folder is {folder} is not running", remedy=RESTART_REMEDY
        )
    if state is not None:
        return CoordinatorUnreachable(
            f"no coordinator is running in {state}: {folder / CONTACT_FILE} does not exist",
            remedy="specify the state folder that the running coordinator printed when it started",
        )
    option = "" if run == "default" else f" --run {run}"
    found = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONTACT_FILE}"))
    known = f" (this user's runs: {', '.join(found[:MAX_LISTED_RUNS])})" if found else ""
    return CoordinatorUnreachable(
        f'no coordinator of the run "{run}" is running on this machine as this user: '
        f"{folder / CONTACT_FILE} does not exist",
        remedy=f"type the command in the folder of the run's run.toml, name the run with --run NAME{known}, "
        f"or its state folder with --state FOLDER; gridtrain coordinator{option} starts or continues it",
    )
