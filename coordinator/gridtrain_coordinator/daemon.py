"""The coordinator's only loop: it carries out what the membership core decides.

Decides nothing about members, generations or verdicts; never touches a gradient, and never imports
torch.  What the core wants journalled is on the disk before anything that follows is sent.

                  poll                    handle, tick                   in order
    Transport ------------> Coordinator --------------> Membership ---------------------+
        ^                        ^                                                      |
        |                        +---- Lost, if a send failed                           v
        +------- Send, Dismiss ------------------------------ Store <-- Journal, all of a turn at once
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO

from gridtrain._version import __version__
from gridtrain.config import DEFAULT_PORT, Deadlines
from gridtrain.errors import ConfigError, JournalError, TransportError
from gridtrain.protocol import membership_io as io
from gridtrain.protocol.membership import Membership
from gridtrain.protocol.messages import PeerId, StatusReply, StatusRequest
from gridtrain.protocol.recovery import recover
from gridtrain.transport.base import PeerDown, PeerUp, Received, Transport, TransportEvent, Violation
from gridtrain_coordinator.log import Log, log_to, silent
from gridtrain_coordinator.store import Store
from gridtrain_coordinator.views import Speedometer, status_payload

SOFTWARE = f"gridtrain {__version__}"
MAX_WAIT_S = 0.25
"""The longest single wait, so that a stop is noticed within it."""

FAREWELL_S = 5.0
"""After the end of the run, workers get so long to hear of it and to leave."""


class Stop(Protocol):
    """A `threading.Event`, or anything else that can tell."""

    def is_set(self) -> bool: ...


class Core(Protocol):
    """What the loop needs of `Membership`."""

    @property
    def deadline_s(self) -> float: ...
    def start(self, now_s: float) -> list[io.Effect]: ...
    def handle(self, event: io.Event, now_s: float) -> list[io.Effect]: ...
    def tick(self, now_s: float) -> list[io.Effect]: ...
    def snapshot(self, now_s: float) -> dict[str, Any]: ...


class Coordinator:
    """Owns a transport, a core and a store, and closes transport and store when `run` returns.

    May be constructed in one thread and run in another.

    Args:
        transport: any `Transport`, listening already.
        store: the journal; `Store.open(":memory:")` for a group that lives in one process.
        membership: the core; its term must come from `store.next_term()`.
        log: gets one call for each event.
        exit_when_finished: `run` returns when the run is finished and its workers have left.
        address: where workers find it, for `gridtrain status`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        membership: Core,
        *,
        log: Log = silent,
        exit_when_finished: bool = False,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._store = store
        self._core = membership
        self._log = log
        self._exit_when_finished = exit_when_finished
        self._clock = clock
        self._speed = Speedometer()
        self._address = address
        self._started_s = clock()
        self._farewell_until_s: float | None = None

    @classmethod
    def of_run(
        cls,
        transport: Transport,
        store: Store,
        *,
        run: str = "default",
        min_workers: int = 1,
        deadlines: Deadlines | None = None,
        log: Log = silent,
        exit_when_finished: bool = False,
        address: str = "",
    ) -> Coordinator:
        """A coordinator with the real core, in the journal's next term.

        Raises `JournalError` if the journal is that of another run, or cannot be understood.
        """
        entries = [(entry.kind, entry.body) for entry in store.entries()]
        runs = {body["run"] for kind, body in entries if kind == "term" and "run" in body}
        if runs - {run}:
            raise JournalError(
                f'the journal is that of the run "{runs.pop()}", not "{run}"',
                remedy="name another file with --journal, or the other run with --run",
            )
        try:
            recovered = recover(entries)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(
                f"the journal holds an entry that no coordinator wrote: {error!r}",
                remedy="restore it from a backup, or name a new file with --journal",
            ) from None
        membership = Membership(
            run=run,
            term=store.next_term(),
            min_workers=min_workers,
            deadlines=deadlines or Deadlines(),
            software=SOFTWARE,
            recovered=recovered,
        )
        if recovered.finished:
            raise JournalError(
                f'the run "{run}" of this journal is finished',
                remedy="begin a new one: name another run with --run, or another file with --journal",
            )
        return cls(
            transport, store, membership, log=log, exit_when_finished=exit_when_finished, address=address
        )

    def run(self, stop: Stop) -> None:
        """Serve until `stop` is set, or the run is over (`exit_when_finished`).

        Raises `JournalError` if something cannot be made durable: it is then not sent either.
        """
        try:
            now_s = self._clock()
            self._perform(self._core.start(now_s), now_s)
            while not stop.is_set() and not self._over():
                self._turn()
        finally:
            self._transport.close()
            self._store.close()

    # -- one turn ------------------------------------------------------------------------------

    def _turn(self) -> None:
        wait_s = self._core.deadline_s - self._clock()
        events = self._transport.poll(min(max(wait_s, 0.0), MAX_WAIT_S))
        now_s = self._clock()
        effects = [effect for event in events for effect in self._take(event, now_s)]
        if now_s >= self._core.deadline_s:
            effects += self._core.tick(now_s)
        self._perform(effects, now_s)
        if now_s >= self._speed.due_s():
            self._look_around(now_s)

    def _take(self, event: TransportEvent, now_s: float) -> Sequence[io.Effect]:
        match event:
            case Received(peer, StatusRequest()):
                return [io.Send(peer, StatusReply(self._status(now_s)))]
            case Received(peer, message):
                return self._core.handle(io.Heard(peer, message), now_s)
            case PeerUp(peer):
                return self._core.handle(io.Up(peer), now_s)
            case PeerDown(peer, reason):
                return self._core.handle(io.Lost(peer, reason), now_s)
            case Violation(peer, reason):
                name = peer.hex()[:12] if peer is not None else "not greeted"
                note = io.Note("warning", "violation", {"peer": name, "reason": reason})
                offended = io.Offended(peer, reason) if peer is not None else None
                return [note, *(self._core.handle(offended, now_s) if offended else [])]

    def _perform(self, effects: Sequence[io.Effect], now_s: float) -> None:
        """Carry out effects in order; the journal's first, all in one transaction.

        Writing an entry before an effect that precedes it is harmless: to everybody else it looks
        as if we had been killed in between.  A peer that cannot be sent to is lost, and the core
        hears it once; as peers are finite, so is this loop.
        """
        failed: set[PeerId] = set()
        while effects:
            entries = [(effect.kind, effect.body) for effect in effects if isinstance(effect, io.Journal)]
            if entries:
                self._store.append_all(entries)
            losses: list[io.Lost] = []
            for effect in effects:
                match effect:
                    case io.Send(peer, message) if peer not in failed:
                        try:
                            self._transport.send(peer, message)
                        except TransportError as error:
                            failed.add(peer)
                            losses.append(io.Lost(peer, error.reason))
                    case io.Dismiss(peer):
                        self._transport.hang_up(peer)
                    case io.Note(level, event, fields):
                        self._log(level, event, fields)
            effects = [effect for loss in losses for effect in self._core.handle(loss, now_s)]

    # -- what is seen from outside -------------------------------------------------------------

    def _status(self, now_s: float) -> bytes:
        return status_payload(
            self._core.snapshot(now_s),
            self._speed,
            software=SOFTWARE,
            address=self._address,
            now_s=now_s,
            uptime_s=now_s - self._started_s,
        )

    def _look_around(self, now_s: float) -> None:
        """Once a second: sample the counters, notice the end of the run."""
        snapshot = self._core.snapshot(now_s)
        self._speed.observe(snapshot, now_s)
        if not snapshot["finished"]:
            self._farewell_until_s = None
        elif not snapshot["members"]:
            self._farewell_until_s = now_s
        elif self._farewell_until_s is None:
            self._farewell_until_s = now_s + FAREWELL_S

    def _over(self) -> bool:
        until_s = self._farewell_until_s
        return self._exit_when_finished and until_s is not None and self._clock() >= until_s


# -- the process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person who starts a coordinator chooses.

    Attributes:
        listen: "tcp://host:port"; port 0: any free one.
        advertise: the address that workers are told to use; empty: the one listened at.
        journal: the journal's path; None: `default_journal(run)`.
    """

    run: str = "default"
    listen: str = f"tcp://127.0.0.1:{DEFAULT_PORT}"
    advertise: str = ""
    journal: Path | None = None
    min_workers: int = 1
    exit_when_finished: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.run):
            raise ConfigError(
                f"{self.run!r} cannot be a run's name",
                remedy="use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit",
            )
        if self.min_workers < 1:
            raise ConfigError(
                f"min_workers is {self.min_workers}; it must be >= 1", remedy="leave it out for 1"
            )


def default_journal(run: str) -> Path:
    """Where the journal of `run` lies if nobody says; the directory is made."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "gridtrain" / run
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the journal's directory {folder} cannot be made: {error.strerror}",
            remedy="name a file with --journal",
        ) from None
    return folder / "journal.sqlite"


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
    from gridtrain.transport.zeromq import ZeroMQTransport  # a group in one process needs no ZeroMQ

    stop = StopOnSignal()
    journal = settings.journal or default_journal(settings.run)
    store = Store.open(journal)
    transport = ZeroMQTransport(store.identity(), SOFTWARE, advertise_host=_outward_host())
    try:
        # First the port, then the term: a start that fails leaves no trace.
        bound = transport.listen(settings.listen)
        address = settings.advertise or bound
        coordinator = Coordinator.of_run(
            transport,
            store,
            run=settings.run,
            min_workers=settings.min_workers,
            log=log_to(err),
            exit_when_finished=settings.exit_when_finished,
            address=address,
        )
    except BaseException:
        transport.close()
        store.close()
        raise
    out.write(_greeting(settings, address, journal))
    out.flush()
    coordinator.run(stop)
    return 128 + stop.signal_number if stop.signal_number else 0


def _outward_host() -> str:
    """The address of the interface that leads outwards (nothing is sent); without one, loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that nobody has
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _greeting(settings: Settings, address: str, journal: Path) -> str:
    run = "" if settings.run == "default" else f" --run {settings.run}"
    return (
        f'run "{settings.run}" is coordinated at {address}, journal {journal}\n'
        f"  on each worker:  gridtrain worker {address}{run} -- python train.py\n"
        f"  to watch it:     gridtrain status {address} --watch\n"
    )
