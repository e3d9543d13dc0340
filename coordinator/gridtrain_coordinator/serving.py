"""The coordinator as a process: its folder, keys, port and dashboard, until a signal or the end of the run.

Decides what the person who starts it may choose, where state lies by default, in which order things are
opened, and what is greeted with.  The loop itself is `daemon.Coordinator`, in this process's main thread.

    Settings --> folder, backup --> Store, keys, Door --> port --> next term --> contact file --> loop
                                                 a start that fails up to here leaves no trace
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
from gridtrain.errors import ConfigError, JournalError
from gridtrain.network.transport.identity import make_private_folder
from gridtrain.network.transport.interface import Transport
from gridtrain.network.transport.stack import build_stack
from gridtrain.runtime.client.endpoint_file import EndpointFile
from gridtrain.tools.bundle import Bundle
from gridtrain_coordinator.access.authorization import AccessRole, Authorization
from gridtrain_coordinator.access.authorization import recover_authorization as recover_the_door
from gridtrain_coordinator.access_handler import connection_gate
from gridtrain_coordinator.bundle_server import BundleServer
from gridtrain_coordinator.daemon import SOFTWARE, Coordinator
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress
from gridtrain_coordinator.dashboard.startup import DashboardStartup, open_dashboard
from gridtrain_coordinator.journal.backups import EVERY_S, JOURNAL, KEEP, Backups, restore
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.log import log_to, to_both


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person who starts a coordinator chooses.

    Attributes:
        listen: "tcp://host:port"; port 0: any free one.
        advertise: the address that workers are told to use; empty: the one listened at.
        state: the folder of the journal and the keys; None: `default_state(run)`.
        unencrypted: talk in the clear: on this machine only, or anywhere if `benchmark` says so.
        backup_to: a folder for backups of the state; None: none are made.
        from_backup: begin from this backup, in a state folder without a journal.
        dashboard: where people watch the run in a browser; None: nowhere.
        bundle: the script and what belongs to it, for volunteers; None: they bring their own.
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

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise ConfigError(
                f"{self.run!r} cannot be a run's name",
                remedy="use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit",
            )
        if self.min_workers < 1:
            raise ConfigError(
                f"min_workers is {self.min_workers}; it must be >= 1", remedy="leave it out for 1"
            )


def default_state(run: str) -> Path:
    """Where the journal and the keys of `run` lie if nobody says."""
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
    """A coordinator over TCP in this process's main thread; returns the exit code.

    `out` gets the address for the workers, `err` the log.  0: the run is finished;
    128 + signal: stopped by it.  Raises `JournalError`, `TransportError`, `ConfigError`.
    """
    from gridtrain.network.transport.zmq.zeromq_transport import (
        ZeroMQTransport,  # a group in one process needs no ZeroMQ
    )

    stop = StopOnSignal()
    folder = settings.state or default_state(settings.run)
    _make(folder)
    backups = _backups(settings, folder)
    board = open_dashboard(settings.dashboard, folder, log_to(err))
    log = log_to(err) if board.service is None else to_both(log_to(err), board.service.note)
    if settings.from_backup is not None:
        source = restore(settings.from_backup, folder)
        log_to(err)("info", "restored", {"from": str(source), "to": str(folder)})
    store = JournalStore.open(folder / JOURNAL)
    transport: Transport | None = None
    try:
        identity, operator = store.identity(), operator_identity(folder / JOURNAL)
        door = load_authorization(store, settings.run, operator.public, identity.public)
        sockets = ZeroMQTransport(
            identity,
            SOFTWARE,
            gate=connection_gate(door, time.time),
            encrypted=not settings.unencrypted,
            plain_anywhere=settings.benchmark,
            advertise_host=_outward_host(),
        )
        transport = build_stack(
            sockets, identity, may_relay=relay_policy(door, operator.public), software=SOFTWARE
        )
        # First the port, then the term: a start that fails leaves no trace.
        bound = transport.listen(settings.listen)
        contact = EndpointFile(
            settings.advertise or bound, bound, identity.public, settings.run, not settings.unencrypted
        )
        coordinator = Coordinator.for_run(
            transport,
            store,
            door,
            run=settings.run,
            operator=operator.public,
            min_workers=settings.min_workers,
            plans=settings.plans,
            deadlines=Deadlines(recut_s=settings.recut_s),
            log=log,
            exit_when_finished=settings.exit_when_finished,
            address=contact.address,
            backups=backups,
            window=board.service,
            shelf=BundleServer(settings.bundle),
        )
    except BaseException:
        if transport is not None:
            transport.close()
        store.close()
        board.close()
        raise
    contact.write(folder)
    try:
        board.start()
        out.write(_greeting(settings, contact, folder, board, is_terminal=out.isatty()))
        out.flush()
        coordinator.run(stop)
    finally:
        contact.remove(folder)
        board.close()
    return 128 + stop.signal_number if stop.signal_number else 0


def load_authorization(store: JournalStore, run: str, operator: PeerId, coordinator: PeerId) -> Authorization:
    """Who may come in, as the journal left it.  Raises `JournalError`."""
    try:
        entries = [(entry.kind, entry.body) for entry in store.entries()]
        return recover_the_door(entries, run=run, operator=operator, coordinator=coordinator)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(
            f"the journal holds an entry that no coordinator wrote: {error!r}",
            remedy="restore it from a backup, or begin a new run with another --state",
        ) from None


def relay_policy(door: Authorization, operator: PeerId) -> Callable[[PeerId, PeerId], bool]:
    """The relay of last resort serves members of the run, and nobody else."""

    def may_relay(origin: PeerId, to: PeerId) -> bool:
        members = (door.access_role(key, time.time()) is AccessRole.PEER for key in (origin, to))
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
    """The address of the interface that leads outwards (nothing is sent), of IPv6 where there is no other;
    without one, loopback."""
    for family, elsewhere, form in (  # addresses that nobody has: RFC 5737, RFC 3849
        (socket.AF_INET, "192.0.2.1", "{}"),
        (socket.AF_INET6, "2001:db8::1", "[{}]"),
    ):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return form.format(probe.getsockname()[0])
    return "127.0.0.1"


def _greeting(
    settings: Settings, contact: EndpointFile, folder: Path, board: DashboardStartup, *, is_terminal: bool
) -> str:
    where = f" --state {shlex.quote(str(settings.state))}" if settings.state is not None else ""
    where += "" if settings.run == "default" or where else f" --run {settings.run}"
    clear = "" if contact.encrypted else " --unencrypted"
    command = " -- python train.py" if settings.bundle is None else ""
    lines = [
        f'run "{settings.run}" is coordinated at {contact.address}, state in {folder}',
        f"  to invite a worker:  gridtrain invite{where}",
        f"  on the worker:       gridtrain worker INVITATION{clear}{command}",
        f"  to watch it:         gridtrain status{where} --watch",
    ]
    if settings.bundle is not None:
        lines.append(f"  volunteers run:      {settings.bundle.run.script}, {settings.bundle.digest}")
    lines += board.startup_lines(is_terminal=is_terminal)
    if not contact.encrypted:
        lines.insert(1, "  NOT ENCRYPTED: everybody on the way can read and alter what is sent")
    return "\n".join(lines) + "\n"
