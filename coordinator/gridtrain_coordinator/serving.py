"""Runs the coordinator's process: opens its parts, prints how workers join, and stops at a signal.

    Settings --> folder, backup --> journal, dashboard --> keys, port --> next term --> endpoint --> loop
                                                            a start that fails before this uses up no term

The loop itself, `daemon.Coordinator`, runs in the main thread of the process.
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

from gridtrain._version import SOFTWARE
from gridtrain.config import DEFAULT_PORT, Deadlines
from gridtrain.core.group.invitation import RUN_NAME
from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError, GridtrainError, disk_errors
from gridtrain.network.transport.identity import Identity, make_private_folder
from gridtrain.network.transport.interface import Transport
from gridtrain.network.transport.stack import build_stack
from gridtrain.runtime.client.endpoint_file import EndpointFile
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain.tools.bundle import Bundle
from gridtrain.tools.log_output import LineWriter, is_same_file, put
from gridtrain_coordinator.access.authorization import AccessRole, Authorization
from gridtrain_coordinator.access_handler import AccessHandler, connection_gate
from gridtrain_coordinator.bundle_server import BundleServer
from gridtrain_coordinator.daemon import Coordinator, invalid_entry, recover_membership
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress
from gridtrain_coordinator.dashboard.startup import DashboardStartup, open_dashboard
from gridtrain_coordinator.journal.backups import EVERY_S, JOURNAL, KEEP, Backups, restore
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.log import Log, log_of, to_both


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a coordinator.

    Attributes:
        listen: the address to listen on, "tcp://host:port"; port 0 means any free port.
        advertise: the address that workers use; if empty, it is derived from `listen`.
        state: the folder for the journal and the keys; None for `state_directory(run)`.
        plans: whether ranks are ordered by the measured links.
        recut_s: how long a pipeline with too few workers waits before it is repartitioned, in seconds.
        unencrypted: whether to leave connections unencrypted; allowed only within this machine, unless
            `benchmark` is set.
        backup_to: a folder for backups of the state; None for no backups.
        from_backup: a backup to start from; the state folder must not contain a journal.
        dashboard: the address of the dashboard; None for no dashboard.
        bundle: the script, with its files, that volunteers run; None if workers use their own script.
        log_format: "text" or "json"; "" means text on a terminal, JSON elsewhere.
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
                f"{self.run!r} is not a valid run name",
                remedy="use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or a digit",
            )
        if self.min_workers < 1:
            raise ConfigError(
                f"min_workers is {self.min_workers}; it must be at least 1", remedy="use --min-workers 1"
            )


class StopOnSignal:
    """A stop flag that is set by SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP.

    The flag is a plain attribute, because a signal handler must not wait for a lock.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number

    def is_set(self) -> bool:
        return self.signal_number != 0


def serve_and_log_errors(settings: Settings, *, out: TextIO, err: TextIO) -> int:
    """Run `serve` and return its exit code.

    If the log is JSON, an error that stops the coordinator is written as the log's last line.  The text for
    `out` is also logged, instead of written, if JSON was chosen or if `out` and `err` are the same file.
    """
    writer = LineWriter(err, settings.log_format)
    log = log_of(writer)
    is_logged = writer.is_json and (settings.log_format == "json" or is_same_file(out, err))
    try:
        return serve(settings, out=None if is_logged else out, log=log)
    except GridtrainError as error:
        if not writer.is_json or os.environ.get("GRIDTRAIN_DEBUG"):
            raise
        log("error", "error", {"text": str(error), "exit_code": error.exit_code})
        return error.exit_code
    finally:
        writer.flush()


def serve(settings: Settings, *, out: TextIO | None, log: Log) -> int:
    """Run a coordinator over TCP in this process's main thread; return the exit code.

    The exit code is 0 if the run is finished, and 128 + N if signal N stopped the coordinator.

    Args:
        out: the stream for the coordinator's address and the commands with which workers join; None to log
            them.
        log: a function that receives the log's events; it must not block.

    Raises:
        JournalError, TransportError, ConfigError: the coordinator cannot start or continue.
    """
    stop = StopOnSignal()
    folder = settings.state or state_directory(settings.run)
    coordinator, board, endpoint = _open(settings, folder, log)
    with contextlib.closing(board), endpoint.published(folder):
        board.start()
        is_terminal = out is not None and out.isatty()
        text = _greeting(settings, endpoint, folder, board, is_terminal=is_terminal)
        if out is None:
            log("info", "greeting", {"text": text})
        else:
            put(out, text)
        coordinator.run(stop)
    if not stop.signal_number:
        return 0
    status = coordinator.status()
    same = "the same command" if settings.from_backup is None else "the same command without --from-backup"
    text = f"{same} continues the run"
    if status["finished"]:
        text = "the run has finished"
    elif status["world_size"]:
        text = f"the members continue to train until one fails or a worker joins; {text}"
    fields = {"signal": signal.Signals(stop.signal_number).name, "reason": text}
    log("info", "stopped", fields)
    return 128 + stop.signal_number


def _open(
    settings: Settings, folder: Path, own_log: Log
) -> tuple[Coordinator, DashboardStartup, EndpointFile]:
    """Open all parts of the coordinator.

    If a part cannot be opened, no new term begins, and the parts that are already open are closed.
    """
    with disk_errors(f"the folder {folder} cannot be created", "choose another folder with --state"):
        make_private_folder(folder)
    backups = _backups(settings, folder)
    with contextlib.ExitStack() as opened:  # closed again if the start fails
        log = own_log
        if settings.from_backup is not None:
            source = restore(settings.from_backup, folder)
            opened.callback((folder / JOURNAL).unlink)  # so that the same command can be repeated
            own_log("info", "restored", {"from": str(source), "to": str(folder)})
        # The journal is opened before any port, so that a second start of the run reports that it is in use.
        store = JournalStore.open(folder / JOURNAL)
        opened.callback(store.close)
        board = open_dashboard(settings.dashboard, folder, own_log)
        opened.callback(board.close)
        if board.service is not None:
            log = to_both(own_log, board.service.note)
        identity, operator = store.identity(), operator_identity(folder / JOURNAL).public
        authorization = load_authorization(store, settings.run, operator, identity.public)
        transport = _open_transport(settings, identity, operator, authorization)
        opened.callback(transport.close)
        # The port is opened before the term is written, so that a failed start uses up no term.
        bound = transport.listen(settings.listen)
        endpoint = EndpointFile(
            settings.advertise or bound, bound, identity.public, settings.run, not settings.unencrypted
        )
        membership = recover_membership(
            store,
            identity.public,
            settings.run,
            Deadlines(recut_s=settings.recut_s),
            min_workers=settings.min_workers,
            plans=settings.plans,
            log=log,
        )
        coordinator = Coordinator(
            transport,
            store,
            membership,
            AccessHandler(authorization, membership),
            log=log,
            exit_when_finished=settings.exit_when_finished,
            address=endpoint.address,
            backups=backups,
            dashboard=board.service,
            bundle_server=BundleServer(settings.bundle),
        )
        opened.pop_all()  # the coordinator closes transport and store
    return coordinator, board, endpoint


def _open_transport(
    settings: Settings, identity: Identity, operator: PeerId, authorization: Authorization
) -> Transport:
    from gridtrain.network.transport.zmq.zeromq_transport import (
        ZeroMQTransport,  # imported here because groups within one process do not need it
    )

    sockets = ZeroMQTransport(
        identity,
        SOFTWARE,
        gate=connection_gate(authorization, time.time),
        encrypted=not settings.unencrypted,
        plain_anywhere=settings.benchmark,
        advertise_host=_outward_host(settings.listen),
    )
    may_relay = relay_policy(authorization, operator)
    return build_stack(sockets, identity, may_relay=may_relay, software=SOFTWARE)


def load_authorization(store: JournalStore, run: str, operator: PeerId, coordinator: PeerId) -> Authorization:
    """Return the access control that the journal records.  Raises `JournalError` if an entry is invalid."""
    try:
        entries = ((entry.kind, entry.body) for entry in store.entries(without="generation"))
        return Authorization(run=run, operator=operator, coordinator=coordinator, entries=entries)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_entry(error) from None


def relay_policy(authorization: Authorization, operator: PeerId) -> Callable[[PeerId, PeerId], bool]:
    """Return a function that allows the coordinator to relay only between two members of the run."""

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


def _outward_host(listen: str) -> str:
    """Return the address of the interface with the default route, preferably IPv4.

    Returns the loopback address if there is no default route, or if the only one is for IPv6 while
    `listen` is an IPv4 address.  Sends no packets.
    """
    probes = [(socket.AF_INET, "192.0.2.1", "{}")]  # documentation addresses of RFC 5737 and RFC 3849
    if "[" in listen:
        probes.append((socket.AF_INET6, "2001:db8::1", "[{}]"))
    for family, address, template in probes:
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
        lines.insert(1, "  NOT ENCRYPTED: anyone on the network path can read and alter the traffic")
    return "\n".join(lines) + "\n"
