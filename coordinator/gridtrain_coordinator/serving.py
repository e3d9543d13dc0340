"""The coordinator as a process: its folder, keys, port and dashboard, until a signal or the end of the run.

    Settings --> folder, backup --> journal, keys --> port --> next term --> endpoint file --> loop
                                                 a start that fails up to here leaves no trace

The loop itself is `daemon.Coordinator`, in this process's main thread.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from gridtrain.config import DEFAULT_PORT, Deadlines
from gridtrain.core.group.invitation import RUN_NAME
from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError
from gridtrain.network.transport.identity import Identity, make_private_folder
from gridtrain.network.transport.interface import Transport
from gridtrain.network.transport.stack import build_stack
from gridtrain.runtime.client.endpoint_file import EndpointFile
from gridtrain.tools.bundle import Bundle
from gridtrain_coordinator.access.authorization import AccessRole, Authorization, recover_authorization
from gridtrain_coordinator.access_handler import connection_gate
from gridtrain_coordinator.bundle_server import BundleServer
from gridtrain_coordinator.daemon import SOFTWARE, Coordinator, invalid_entry
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress
from gridtrain_coordinator.dashboard.startup import DashboardStartup, open_dashboard
from gridtrain_coordinator.journal.backups import EVERY_S, JOURNAL, KEEP, Backups, restore
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.log import log_to, to_both


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a coordinator.

    Attributes:
        listen: "tcp://host:port"; port 0: any free one.
        advertise: the address that workers are told to use; empty: that of `listen`.
        state: the folder of the journal and the keys; None: `default_state(run)`.
        unencrypted: without encryption: on this machine only, or anywhere with `benchmark`.
        backup_to: a folder for backups of the state; None: none are made.
        from_backup: start from this backup, in a state folder without a journal.
        dashboard: where people watch the run in a browser; None: there is no dashboard.
        bundle: the script and its files for volunteers; None: workers bring their own.
        log_format: "text" or "json"; "": text on a terminal, JSON elsewhere.
    """

    run: str = "default"
    listen: str = f"tcp://127.0.0.1:{DEFAULT_PORT}"
    advertise: str = ""
    state: Path | None = None
    unencrypted: bool = False
    benchmark: bool = False
    min_workers: int = 1
    plans: bool = True
    recut_s: float = Deadlines().recut_s
    exit_when_finished: bool = False
    backup_to: Path | None = None
    backup_every_s: float = EVERY_S
    backup_keep: int = KEEP
    from_backup: Path | None = None
    dashboard: DashboardAddress | None = None
    bundle: Bundle | None = None
    log_format: str = ""

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise ConfigError(
                f"{self.run!r} cannot be a run's name",
                remedy="use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or a digit",
            )
        if self.min_workers < 1:
            raise ConfigError(
                f"min_workers is {self.min_workers}; it must be >= 1", remedy="leave it out for 1"
            )


def default_state(run: str) -> Path:
    """The default folder of the journal and the keys of `run`."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "gridtrain" / run


class StopOnSignal:
    """Set by SIGINT or SIGTERM; a plain attribute, because a handler must not wait for a lock."""

    def __init__(self) -> None:
        self.signal_number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number

    def is_set(self) -> bool:
        return self.signal_number != 0


def serve(settings: Settings, *, out: TextIO, err: TextIO) -> int:
    """Run a coordinator over TCP in this process's main thread; returns the exit code.

    0: the run is finished; 128 + signal: it was stopped by that signal.

    Args:
        out: gets the address for the workers.
        err: gets the log.

    Raises:
        JournalError, TransportError, ConfigError: the coordinator cannot start or continue.
    """
    stop = StopOnSignal()
    folder = settings.state or default_state(settings.run)
    _make(folder)
    backups = _backups(settings, folder)
    with contextlib.ExitStack() as opened:  # closed again if the start fails
        log = own_log = log_to(err, settings.log_format)
        board = open_dashboard(settings.dashboard, folder, own_log)
        opened.callback(board.close)
        if board.service is not None:
            log = to_both(own_log, board.service.note)
        if settings.from_backup is not None:
            source = restore(settings.from_backup, folder)
            own_log("info", "restored", {"from": str(source), "to": str(folder)})
        store = JournalStore.open(folder / JOURNAL)
        opened.callback(store.close)
        identity, operator = store.identity(), operator_identity(folder / JOURNAL).public
        authorization = load_authorization(store, settings.run, operator, identity.public)
        transport = _open_transport(settings, identity, operator, authorization)
        opened.callback(transport.close)
        # First the port, then the term: a start that fails leaves no trace.
        bound = transport.listen(settings.listen)
        endpoint = EndpointFile(
            settings.advertise or bound, bound, identity.public, settings.run, not settings.unencrypted
        )
        coordinator = Coordinator.for_run(
            transport,
            store,
            authorization,
            run=settings.run,
            operator=operator,
            min_workers=settings.min_workers,
            plans=settings.plans,
            deadlines=Deadlines(recut_s=settings.recut_s),
            log=log,
            exit_when_finished=settings.exit_when_finished,
            address=endpoint.address,
            backups=backups,
            dashboard=board.service,
            bundle_server=BundleServer(settings.bundle),
        )
        opened.pop_all()  # the coordinator closes transport and store
    endpoint.write(folder)
    try:
        board.start()
        out.write(_greeting(settings, endpoint, folder, board, is_terminal=out.isatty()))
        out.flush()
        coordinator.run(stop)
    finally:
        endpoint.remove(folder)
        board.close()
    return 128 + stop.signal_number if stop.signal_number else 0


def _open_transport(
    settings: Settings, identity: Identity, operator: PeerId, authorization: Authorization
) -> Transport:
    from gridtrain.network.transport.zmq.zeromq_transport import (
        ZeroMQTransport,  # not needed by groups within one process
    )

    sockets = ZeroMQTransport(
        identity,
        SOFTWARE,
        gate=connection_gate(authorization, time.time),
        encrypted=not settings.unencrypted,
        plain_anywhere=settings.benchmark,
        advertise_host=_outward_host(),
    )
    may_relay = relay_policy(authorization, operator)
    return build_stack(sockets, identity, may_relay=may_relay, software=SOFTWARE)


def load_authorization(store: JournalStore, run: str, operator: PeerId, coordinator: PeerId) -> Authorization:
    """Access control as the journal left it.  Raises `JournalError`."""
    try:
        entries = [(entry.kind, entry.body) for entry in store.entries()]
        return recover_authorization(entries, run=run, operator=operator, coordinator=coordinator)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_entry(error) from None


def relay_policy(authorization: Authorization, operator: PeerId) -> Callable[[PeerId, PeerId], bool]:
    """The relay of last resort serves only members of the run."""

    def may_relay(origin: PeerId, to: PeerId) -> bool:
        members = (authorization.access_role(key, time.time()) is AccessRole.PEER for key in (origin, to))
        return operator not in (origin, to) and all(members)

    return may_relay


def _backups(settings: Settings, state: Path) -> Backups | None:
    if settings.backup_to is None:
        return None
    backups = Backups(settings.backup_to, state, every_s=settings.backup_every_s, keep=settings.backup_keep)
    backups.check_folder()
    return backups


def _make(folder: Path) -> None:
    try:
        make_private_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be made: {error.strerror}", remedy="name another one with --state"
        ) from None


def _outward_host() -> str:
    """The address of the interface with the default route, IPv4 if possible; without one, loopback.

    Nothing is sent.
    """
    for family, address, template in (  # documentation addresses of RFC 5737 and RFC 3849
        (socket.AF_INET, "192.0.2.1", "{}"),
        (socket.AF_INET6, "2001:db8::1", "[{}]"),
    ):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return template.format(probe.getsockname()[0])
    return "127.0.0.1"


def _greeting(
    settings: Settings, endpoint: EndpointFile, folder: Path, board: DashboardStartup, *, is_terminal: bool
) -> str:
    where = f" --state {shlex.quote(str(settings.state))}" if settings.state is not None else ""
    where += "" if settings.run == "default" or where else f" --run {settings.run}"
    clear = "" if endpoint.encrypted else " --unencrypted"
    command = " -- python train.py" if settings.bundle is None else ""
    lines = [
        f'run "{settings.run}" is coordinated at {endpoint.address}, state in {folder}',
        f"  to invite a worker:  gridtrain invite{where}",
        f"  on the worker:       gridtrain worker INVITATION{clear}{command}",
        f"  to watch it:         gridtrain status{where} --watch",
    ]
    if settings.bundle is not None:
        lines.append(f"  volunteers run:      {settings.bundle.run.script}, {settings.bundle.digest}")
    lines += board.startup_lines(is_terminal=is_terminal)
    if not endpoint.encrypted:
        lines.insert(1, "  NOT ENCRYPTED: anybody on the network path can read and alter the traffic")
    return "\n".join(lines) + "\n"
