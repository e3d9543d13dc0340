"""Starts a coordinator and its members as processes for `gridtrain bench`, and has them exchange on command.

    host.run("hub",      gridtrain coordinator ...)
    host.run("hub",      gridtrain invite ...)
    host.run("worker-1", python -m gridtrain.tools.bench.bench_member ...)     and so on, one for each member
    group.repeat() -> ExchangeSample       one exchange, from the common start to the end of the last member

A host runs the processes on this machine's loopback interface (`LocalHost`) or, in the benchmarks, in
network namespaces.  All processes are terminated when the `with` block of `start_group` is left.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gridtrain.errors import GridtrainError
from gridtrain.runtime.process_hooks import install_sigterm_handler
from gridtrain.tools.bench.process_barrier import BarrierServer, MemberReport
from gridtrain.tools.child_processes import CLI_COMMAND, end_processes, log_tail, process_environment

MEMBER_COMMAND = (sys.executable, "-m", "gridtrain.tools.bench.bench_member")
INVITATION_TIMEOUT_S = 30
START_TIMEOUT_S, START_TIMEOUT_PER_MEMBER_S = 60.0, 10.0
REPEAT_TIMEOUT_S = 600.0
TAIL_LINES = 12
_MEANS = ("cpu_s", "sent_bytes", "workspace_s", "prepare_s", "prepare_cpu_s")


class LocalHost:
    """This machine, on which the members limit their rates themselves.

    The benchmarks have other hosts, in network namespaces, with the same attributes and methods.

    Attributes:
        interface: the interface whose bytes are counted; "" to count the bytes of the members' sockets.
        limit: the limit that each member sets itself, such as "100Mbit"; "" if the link itself is
            limited, or if there is no limit.
    """

    interface = ""

    def __init__(self, rate: str = "") -> None:
        self.limit = rate

    def listen(self) -> tuple[str, str]:
        """Return two addresses: the one on which the coordinator listens, and the one that it advertises to
        members; the second is "" if they are equal."""
        return "tcp://127.0.0.1:0", ""

    def member_listen(self) -> str:
        """Return the address on which a member listens; "" if it listens on the interface that leads to the
        coordinator."""
        return "tcp://127.0.0.1:0"

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program in its own session; its output goes to the files `log`.out and `log`.err.

        Args:
            who: the participant that the program belongs to: "hub" or "worker-1", "worker-2", ...
        """
        return start_process(argv, log, env)


def start_process(
    argv: Sequence[str], log: Path, env: Mapping[str, str], *, own_session: bool = True
) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to the files `log`.out and `log`.err.

    The process leads its own process group and, if `own_session` is true, its own session.
    """
    with Path(f"{log}.out").open("wb") as out, Path(f"{log}.err").open("wb") as err:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(env),
            start_new_session=own_session,
            process_group=None if own_session else 0,
        )


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """The exchange that a group performs.

    Attributes:
        exchange: the name of the exchange; see `exchange_names`.
        workers: the number of members in the group.
        n: the number of elements in the vector.
        order: the rank order, as in `gridtrain coordinator --order`.
    """

    exchange: str
    workers: int
    n: int
    encrypted: bool = False
    order: str = "planned"


@dataclass(frozen=True, slots=True)
class ExchangeSample:
    """The measurements of one exchange of the whole group.

    Attributes:
        seconds: the time from the first member's start to the last member's end, including vote and decision.
        cpu_s: the CPU time that a member's process uses for the exchange, in seconds; like all figures of a
            member, a mean over the members.
        sent_bytes: the bytes that a member sent in the exchange.
        payload_bytes: the size of a payload, excluding the transport's framing.
        workspace_s: the part of `seconds` that a member spent on decoding, adding, merging, encoding and
            hashing.
        prepare_s, prepare_cpu_s: the time and CPU time spent on selecting and encoding, before the start.
        aborts: the number of aborted attempts; unless it is 0, the figures cover more than one exchange.
    """

    seconds: float
    cpu_s: float
    sent_bytes: float
    payload_bytes: float
    workspace_s: float
    prepare_s: float
    prepare_cpu_s: float
    aborts: int

    @classmethod
    def from_reports(cls, done: Sequence[MemberReport], settled: Sequence[MemberReport]) -> ExchangeSample:
        start_s, end_s = (report["start_s"] for report in done), (report["end_s"] for report in done)
        payloads = sum(report["payloads"] for report in settled)
        return cls(
            seconds=max(end_s) - min(start_s),
            payload_bytes=sum(report["payload_bytes"] for report in settled) / max(1, payloads),
            aborts=max(report["aborts"] for report in settled),
            **{name: fmean(report[name] for report in settled) for name in _MEANS},
        )


class BenchGroup:
    """A group of running members that wait at the barrier."""

    def __init__(self, setting: BenchSetting, referee: BarrierServer) -> None:
        self.setting = setting
        self._referee = referee
        self._waiting = False

    def wait(self, timeout_s: float = REPEAT_TIMEOUT_S) -> None:
        """Wait until all members are ready for the next repeat.

        Raises `GridtrainError` if a process has ended, if the members are not ready in time, or if the group
        has lost a member.
        """
        if self._waiting:
            return
        for report in self._referee.wait_for_all("ready", timeout_s):
            if report["world_size"] != self.setting.workers:
                text = f"the group has {report['world_size']} members instead of {self.setting.workers}"
                raise GridtrainError(text, remedy="look for the lost member in the coordinator's log")
        self._waiting = True

    def repeat(self) -> ExchangeSample:
        """Run one exchange.

        Raises `GridtrainError` as `wait` does, or if the exchange takes too long; if a process has ended, the
        message has the last lines of its logs.
        """
        self.wait()
        self._waiting = False
        self._referee.release("go")
        done = self._referee.wait_for_all("done", REPEAT_TIMEOUT_S)
        self._referee.release("count")
        settled = self._referee.wait_for_all("settled", REPEAT_TIMEOUT_S)
        self._referee.release("on")
        return ExchangeSample.from_reports(done, settled)


@contextlib.contextmanager
def start_group(setting: BenchSetting, ground: LocalHost, folder: Path) -> Iterator[BenchGroup]:
    """Start a coordinator and its members; yield the group when it is ready for the first repeat.

    Args:
        ground: the host that starts the processes.
        folder: the folder for keys, journal, logs and the barrier's socket; its path must be short, because
            a socket's path is limited to 100 bytes.

    Raises:
        GridtrainError: a process failed (the message has the last lines of its logs), or the members are not
            ready in time.
    """
    folder.mkdir(parents=True)
    install_sigterm_handler()
    env = process_environment(folder / "state")
    running: dict[str, subprocess.Popen[bytes]] = {}

    def check() -> None:
        if ended := [name for name, process in running.items() if process.poll() is not None]:
            raise GridtrainError(
                "\n".join([f"{', '.join(ended)} ended", *(member_log_tail(folder / name) for name in ended)]),
                remedy=f"see the complete logs in {folder}",
            )

    try:
        running["coordinator"] = ground.run(
            "hub", _coordinator(setting, ground, folder), folder / "coordinator", env
        )
        invitation = _invitation(setting, ground, folder, env)
        with BarrierServer(folder / "referee", setting.workers, check) as referee:
            for number in range(1, setting.workers + 1):
                name = f"worker-{number}"
                argv = _member(setting, ground, folder, name, number, invitation)
                running[name] = ground.run(name, argv, folder / name, env)
            group = BenchGroup(setting, referee)
            group.wait(START_TIMEOUT_S + START_TIMEOUT_PER_MEMBER_S * setting.workers)
            yield group
            referee.release("end")
    finally:
        end_processes(list(running.values()))


def _coordinator(setting: BenchSetting, ground: LocalHost, folder: Path) -> list[str]:
    listen, advertise = ground.listen()
    argv = [*CLI_COMMAND, "coordinator", "--state", str(folder / "hub"), "--listen", listen]
    argv += ["--min-workers", str(setting.workers), "--order", setting.order]
    argv += ["--advertise", advertise] if advertise else []
    return argv + ([] if setting.encrypted else ["--unencrypted", "--benchmark"])


def _invitation(setting: BenchSetting, ground: LocalHost, folder: Path, env: Mapping[str, str]) -> str:
    argv = [*CLI_COMMAND, "invite", "--state", str(folder / "hub"), "--uses", str(setting.workers)]
    process = ground.run("hub", [*argv, "--wait", f"{INVITATION_TIMEOUT_S}s"], folder / "invite", env)
    try:
        code = process.wait(2 * INVITATION_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_processes([process])
    if code != 0:
        logs = "\n".join(member_log_tail(folder / name) for name in ("invite", "coordinator"))
        raise GridtrainError(
            f"no invitation was created\n{logs}", remedy=f"see the complete logs in {folder}"
        )
    return Path(folder, "invite.out").read_text().strip()


def _member(
    setting: BenchSetting, ground: LocalHost, folder: Path, name: str, seed: int, invitation: str
) -> list[str]:
    argv = [*MEMBER_COMMAND, "--invitation", invitation, "--name", name, "--exchange", setting.exchange]
    argv += ["--n", str(setting.n), "--seed", str(seed), "--referee", str(folder / "referee")]
    for option, value in (
        ("--interface", ground.interface),
        ("--limit", ground.limit),
        ("--listen", ground.member_listen()),
    ):
        argv += [option, value] if value else []
    return argv + ([] if setting.encrypted else ["--unencrypted"])


def member_log_tail(log: Path) -> str:
    """Return the last lines of `log`.out and `log`.err, below a heading with the process's name."""
    return log_tail(log.name, [Path(f"{log}.{kind}") for kind in ("out", "err")], TAIL_LINES)
