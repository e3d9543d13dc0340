"""Records the folders of real runs: coordinators, workers' agents and their scripts, as processes.

Written for commit 330f465; never adapted to a later one.

    run "whole"                                            what the journal has of it
    anna, bert      train from the beginning               invitation of six uses
    clara           comes, is kicked                       invitation of one use, used up
    dora            comes, is banned                       expelled, by name
    erik            sends what only a coordinator may      strikes, expelled by strikes
    a key           is banned, and unbanned                pardoned
    gina            sets rules, pauses, ends               her state folder is kept
    coordinator     is stopped, started again, killed      two terms; kept as "interrupted"
    anna, bert      go on to the end in a third term       kept as "finished"

    run "stages"    hugo, ines train two stages; ines is killed and comes back; then all are killed
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oldformats.positions import keys_of

from gridtrain.protocol.invitation import Invitation, parse
from gridtrain.protocol.messages import Join, Refused, Welcome
from gridtrain.runtime.client import SOFTWARE, only
from gridtrain.runtime.entry import enrol
from gridtrain.runtime.operator import Contact, Operator
from gridtrain.transport.base import PeerUp, Received
from gridtrain.transport.curve import Identity
from gridtrain.transport.zeromq import ZeroMQTransport
from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.prometheus import exposition

CLI = (sys.executable, "-m", "gridtrain.cli")
SCRIPTS = Path(__file__).parent.parent / "data" / "scripts"
WITHIN_S = 120.0
WHOLE_STEPS, STAGES_STEPS = 700, 150
SLOW_S = "0.15"

RUN_TOML = """\
[run]
name = "whole"
about = "a recorded run"
script = "train.py"
arguments = ["gtopk", "%d"]
"""

Write = Callable[[Path, Any], None]


def record(out: Path, write: Write) -> None:
    events: set[str] = set()
    for which in (Whole, Stages):
        with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
            which(Path(folder), out, write).record()
            events |= {json.loads(line)["event"] for line in _json_lines(Path(folder) / "coordinator.log")}
    write(out / "interfaces" / "events.json", sorted(events))


def until(true: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := true()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.1)
    return found


class Programs:
    """Processes of one recorded run, each with a log; all of them end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.pause = folder / "pause"
        self.pause.write_text(SLOW_S)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for path in sorted(self.folder.glob("*.log")):
                print(f"--- {path.name}\n{path.read_text()[-1500:]}", file=sys.stderr)
            raise
        finally:
            for process in self.running.values():
                process.kill()
            for process in self.running.values():
                process.wait()

    def environment(self, name: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("GRIDTRAIN_")}
        return inherited | {
            "XDG_STATE_HOME": str(self.folder / "homes" / name),
            "PAUSE_FILE": str(self.pause),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                (*CLI, *words), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                env=self.environment(name),
            )  # fmt: skip

    def ask(self, *words: str, name: str = "owner") -> str:
        """Output of a command that has to succeed."""
        done = subprocess.run(
            (*CLI, *words), capture_output=True, text=True, timeout=WITHIN_S, cwd=self.folder,
            env=self.environment(name),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def end(self, name: str, number: int) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(WITHIN_S)

    def kill(self, *names: str) -> None:
        """As by a power failure: nobody gets to say anything any more."""
        pids = [pid for name in names for pid in _with_children(self.running[name].pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for name in names:
            self.running.pop(name).wait(WITHIN_S)

    def status(self) -> dict[str, Any]:
        with Operator(Contact.find(state=self.state, wait_s=30.0)) as operator:
            return operator.status()

    def members(self) -> list[str]:
        """Names of the generation that trains; [] while none does."""
        shown = self.status()
        here = [line["name"] for line in shown["members"] if line["rank"] is not None]
        return sorted(here) if shown["phase"] == "training" and len(here) == shown["world_size"] else []

    def invite(self, *words: str) -> str:
        return self.ask("invite", "--state", str(self.state), *words)

    def has_checkpoint(self, name: str, step: int) -> bool:
        found = self.folder.glob(f"homes/{name}/gridtrain/*/checkpoints/*/*/**/step-*")
        return any(int(path.name[5:]) >= step for path in found if path.name[5:].isdigit())


def _with_children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [pid, *map(int, found.split())]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keep_state(state: Path, out: Path) -> None:
    """A coordinator's folder; SQLite writes its WAL into the file when the last connection is closed."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(state, out)
    for journal in list(out.rglob("journal.sqlite")):
        connection = sqlite3.connect(journal)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        assert not list(journal.parent.glob("journal.sqlite-*"))
        journal.rename(journal.with_name("journal.db"))  # *.sqlite is in .gitignore


def keep_home(home: Path, out: Path, *, bundle: bool = False) -> None:
    """A worker's state folder without sockets and locks; `bundle`: with the files of the run's bundle."""
    shutil.rmtree(out, ignore_errors=True)
    without = ["*.lock", "*.sock", "lock", ".*", *(["[0-9a-f]" * 32] if not bundle else [])]
    shutil.copytree(home, out, ignore=shutil.ignore_patterns(*without))


class Whole:
    """The run "whole"; see the module's text."""

    def __init__(self, folder: Path, out: Path, write: Write) -> None:
        self.run, self.out, self.write = Programs(folder), out, write
        self.known: dict[str, Any] = {}
        (folder / "run.toml").write_text(RUN_TOML % WHOLE_STEPS)
        shutil.copy(SCRIPTS / "train.py", folder)

    def coordinate(self, port: int, *words: str) -> None:
        self.run.start(
            "coordinator", "coordinator", "--listen", f"tcp://127.0.0.1:{port}",
            "--state", str(self.run.state), "--backup-to", str(self.run.folder / "backups"),
            "--backup-keep", "1", "--min-workers", "2", "--dashboard", "127.0.0.1:0", *words,
        )  # fmt: skip
        until(lambda: (self.run.state / "coordinator.json").exists(), "the coordinator listens")

    def work(self, name: str, invitation: str, *words: str) -> None:
        digest = self.run.status()["bundle"]["digest"]
        self.run.start(
            name, "worker", invitation, "--name", name, "--accept", digest, "--checkpoint-every", "20", *words
        )

    def record(self) -> None:
        run, port = self.run, free_port()
        with run.ended():
            self.coordinate(port)
            crew = self.invite("crew", "--uses", "6", "--expires", "30d")
            self.work("anna", crew)
            self.work("bert", crew)
            self.await_members("anna", "bert")
            self.come_and_go(crew)
            self.strike_out(crew)
            self.volunteer(crew)
            self.write(self.out / "interfaces" / "status.json", self.keep_status())
            assert run.end("coordinator", signal.SIGTERM) == 143
            (run.state / "coordinator.json").unlink(missing_ok=True)
            self.coordinate(port)
            self.await_members("anna", "bert")
            step = run.status()["step"]
            until(
                lambda: all(run.has_checkpoint(name, step + 20) for name in ("anna", "bert")), "checkpoints"
            )
            run.kill("coordinator", "anna", "bert")
            self.keep("interrupted")
            self.finish(port)

    def invite(self, name: str, *words: str) -> str:
        text = self.run.invite(*words)
        self.known.setdefault("invitations", {})[name] = text
        return text

    def await_members(self, *names: str) -> None:
        until(lambda: self.run.members() == sorted(names), f"{names} train")

    def come_and_go(self, crew: str) -> None:
        """Invitations of all sorts, one who is kicked, one who is banned, and a key that is pardoned."""
        run, state = self.run, str(self.run.state)
        self.invite("expired", "--uses", "3", "--expires", "1s")
        withdrawn = self.invite("withdrawn", "--uses", "2")
        run.ask("invite", "--state", state, "--withdraw", withdrawn)
        self.invite("open", "--uses", "5", "--expires", "366d")
        self.work("clara", self.invite("used up", "--uses", "1"))
        self.await_members("anna", "bert", "clara")
        run.ask("kick", "clara", "--reason", "too slow", "--state", state)
        self.await_members("anna", "bert")
        self.work("dora", crew)
        self.await_members("anna", "bert", "dora")
        run.ask("ban", "dora", "--reason", "spam", "--state", state)
        self.await_members("anna", "bert")
        for name in ("clara", "dora"):
            run.running.pop(name).wait(WITHIN_S)
        felix = Identity.generate().public.hex()
        run.ask("ban", felix, "--reason", "by mistake", "--state", state)
        run.ask("unban", felix, "--state", state)
        self.known["pardoned"] = felix

    def strike_out(self, crew: str) -> None:
        """A worker that sends what only a coordinator may send, three times."""
        invitation, identity = parse(crew), Identity.generate()
        enrol(invitation, identity.public, 10.0)
        self.known["struck out"] = identity.public.hex()
        codes = [_offend(invitation, identity) for _ in range(3)]
        assert codes == ["offence", "offence", "kicked"], codes

    def volunteer(self, crew: str) -> None:
        """Rules, a pause and an end: what is left of it in the worker's state folder."""
        run = self.run
        sensors = run.folder / "sensors.json"
        sensors.write_text('{"on_battery": false, "temperature_C": 50, "idle_s": 9999}')
        words = ("--handover-mib", "0", "--sensors", str(sensors), "--set", "temperature=90",
                 "--upload-limit", "50Mbit")  # fmt: skip
        self.work("gina", crew, *words)
        self.await_members("anna", "bert", "gina")
        assert run.end("gina", signal.SIGTERM) == 143
        self.await_members("anna", "bert")
        # Her key is known already, so she does not need this invitation: she keeps it.
        self.work("gina", self.invite("kept", "--uses", "1"), *words)
        self.await_members("anna", "bert", "gina")
        rules = ("battery=pause", "upload=5Mbit", "budget=5GB", "temperature=80/70")
        rules += ("hours=06:00-23:00,23:00-06:00",)
        run.ask("worker", "set", *rules, name="gina")
        until(lambda: run.has_checkpoint("gina", 1), "a checkpoint of gina's")
        self.known["shown"] = json.loads(run.ask("worker", "show", name="gina"))
        (socket_path,) = run.folder.glob("homes/gina/gridtrain/*/identities/*/*/control.sock")
        self.known["wish"] = _wish(socket_path)
        run.ask("worker", "pause", "--for", "366d", name="gina")
        self.await_members("anna", "bert")
        until(lambda: run.status()["resting"], "gina rests")
        self.resting = run.status()["resting"]
        run.end("gina", signal.SIGTERM)

    def keep_status(self) -> dict[str, Any]:
        """As the operator sees it, and what the dashboard makes of it."""
        mine = self.run.status()
        mine["resting"] = mine["resting"] or self.resting
        board = Board()
        board.note(1.0, "info", "joined", {"name": "anna"})
        board.show(mine, 1.0)
        lines = exposition(board).decode().splitlines()
        samples = [
            re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line) for line in lines if not line.startswith("#")
        ]
        return {
            "status": mine,
            "prometheus types": [
                line.removeprefix("# TYPE ").split() for line in lines if line.startswith("# TYPE")
            ],
            "prometheus labels": sorted(
                {
                    (match[1], *re.findall(r'(\w+)="', match[2] or ""))
                    for match in samples
                    if match is not None
                }
            ),
            "board": sorted(keys_of(board.whole()) - keys_of(board.whole()["run"]["facts"])),
            "columns": list(board.whole()["columns"]),
            "points": list(board.whole()["point"]),
            "worker": sorted(board.workers()[0]),
        }

    def keep(self, name: str) -> None:
        """The coordinator's folder, and at the first time everything else."""
        run, out = self.run, self.out
        keep_state(run.state, out / "coordinator" / name)
        if name == "interrupted":
            keep_state(run.folder / "backups", out / "coordinator" / "backups")
            shutil.copy(run.folder / "run.toml", out / "scripts" / "run.toml")
            for worker in ("anna", "bert", "gina"):
                keep_home(run.folder / "homes" / worker, out / "workers" / worker, bundle=worker == "anna")
            lines = [json.loads(line) for line in _json_lines(run.folder / "coordinator.log")]
            self.known["keys"] = {
                line["fields"]["name"]: line["fields"]["peer"] for line in lines if line["event"] == "joined"
            }
            self.write(out / "coordinator" / "known.json", self.known)

    def finish(self, port: int) -> None:
        """The same run to its end."""
        run = self.run
        run.pause.unlink()
        self.coordinate(port, "--exit-when-finished")
        crew = self.known["invitations"]["crew"]
        for name in ("anna", "bert"):
            self.work(name, crew)
        for name in ("anna", "bert", "coordinator"):
            assert run.running.pop(name).wait(WITHIN_S) == 0, name
        self.keep("finished")


def _json_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith('{"ts"')]


def _offend(invitation: Invitation, identity: Identity) -> str:
    """Join, send a Welcome, and wait for the refusal; its code."""
    transport = ZeroMQTransport(identity, SOFTWARE, gate=only(invitation.coordinator))
    deadline_s = time.monotonic() + 20.0
    try:
        transport.dial(invitation.coordinator, invitation.address)
        while time.monotonic() < deadline_s:
            for event in transport.poll(0.1):
                match event:
                    case PeerUp():
                        transport.send(invitation.coordinator, Join(invitation.run, "erik", ""))
                    case Received(peer, Welcome()):
                        transport.send(peer, Welcome(1, "whole", "not a coordinator"))
                    case Received(_, Refused(code)):
                        return code
    finally:
        transport.close()
    raise TimeoutError("nobody refused")


def _wish(path: Path) -> dict[str, Any]:
    """The first line that an agent sends to a script."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(10.0)
        line.connect(os.readlink(path) if path.is_symlink() else str(path))
        line.sendall(json.dumps({"role": "script", "pid": 1}).encode() + b"\n")
        said: dict[str, Any] = json.loads(line.makefile().readline())
        return said


class Stages:
    """The run "stages"; see the module's text."""

    def __init__(self, folder: Path, out: Path, write: Write) -> None:
        self.run, self.out, self.write = Programs(folder), out, write
        shutil.copy(SCRIPTS / "pipeline.py", folder)

    def coordinate(self, port: int) -> None:
        self.run.start(
            "coordinator", "coordinator", "--run", "stages", "--listen", f"tcp://127.0.0.1:{port}",
            "--state", str(self.run.state), "--min-workers", "2", "--no-dashboard", "--recut-after", "120",
        )  # fmt: skip
        until(lambda: (self.run.state / "coordinator.json").exists(), "the coordinator listens")

    def work(self, name: str, invitation: str) -> None:
        command = (sys.executable, str(self.run.folder / "pipeline.py"), str(STAGES_STEPS))
        self.run.start(
            name, "worker", invitation, "--name", name, "--checkpoint-every", "20", "--", *command
        )  # fmt: skip

    def record(self) -> None:
        run, port, out = self.run, free_port(), self.out
        with run.ended():
            self.coordinate(port)
            invitation = run.invite("--uses", "2", "--expires", "30d")
            self.work("hugo", invitation)
            self.work("ines", invitation)
            until(lambda: run.members() == ["hugo", "ines"], "two stages train")
            until(lambda: all(run.has_checkpoint(name, 20) for name in ("hugo", "ines")), "checkpoints")
            step = run.status()["step"]
            until(lambda: run.status()["step"] > step + 4, "some steps that are lost")
            run.kill("ines")
            until(lambda: run.status()["phase"] == "paused", "a stage is in nobody's hands")
            self.work("ines", invitation)
            until(lambda: run.members() == ["hugo", "ines"], "two stages train again")
            step = run.status()["step"]
            until(
                lambda: all(run.has_checkpoint(name, step + 20) for name in ("hugo", "ines")), "checkpoints"
            )
            run.kill("coordinator", "hugo", "ines")
        keep_state(run.state, out / "coordinator" / "stages")
        for worker in ("hugo", "ines"):
            keep_home(run.folder / "homes" / worker, out / "workers" / worker)
