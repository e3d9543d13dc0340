"""Where the programs run, and how each kind of fault is injected there.

What an infrastructure has started or mounted is removed when its `with` block is left.

    Namespaces   a host for the coordinator and for each worker, with shaped links (`lab.net`); needs root.
                 cut: the interface goes down.  hole: packets are dropped in both directions, without a reset
    Loopback     processes on one host; the workers limit their own rates; neither cut nor hole
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from chaos.schedule import DISK, LASTS_S, NETWORK
from lab import ns
from lab.net import Host, Net
from lab.net import why_not as why_no_lab

PORT = 7700
MOUNT = ("mount", "-t", "tmpfs", "-o")
COORDINATOR_DISK, WORKER_DISK = "24m", "24m"
EXIT_TIMEOUT_S = 5.0
FILLER = "filler"


class Infrastructure(Protocol):
    """The hosts of a run and their links.

    Attributes:
        kinds: the kinds of faults that can be injected here.
        listen: where the coordinator listens.
        address: where workers find the coordinator.
        missing: why there are no namespaces; empty if there are.
    """

    kinds: frozenset[str]
    listen: str
    address: str
    missing: str

    def start(
        self, host: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host; its output is appended to `log`.out and `log`.err."""
        ...

    def rate_options(self) -> list[str]:
        """Return options of `gridtrain worker` that limit its rate."""
        ...

    def cut(self, host: str, down: bool) -> None:
        """Take the network interface of a host down, or up again."""
        ...

    def hole(self, host: str, closed: bool) -> None:
        """Drop all packets of a host, or pass them again."""
        ...

    def close(self) -> None: ...


def start_process(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with Path(f"{log}.out").open("ab") as out, Path(f"{log}.err").open("ab") as err:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(env), start_new_session=True
        )


class Loopback:
    """All processes on the loopback interface of this machine."""

    def __init__(self, rate: str) -> None:
        self.kinds = frozenset(LASTS_S) - NETWORK - (frozenset() if may_mount() else DISK)
        self.missing = why_no_lab() or "--loopback was given"
        self._rate = rate
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.listen = self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def start(
        self, host: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return start_process(argv, log, env)

    def rate_options(self) -> list[str]:
        return ["--upload-limit", self._rate, "--download-limit", self._rate] if self._rate else []

    def cut(self, host: str, down: bool) -> None:
        raise NotImplementedError("the loopback interface cannot be cut")

    def hole(self, host: str, closed: bool) -> None:
        raise NotImplementedError("packets on loopback cannot be dropped")

    def close(self) -> None:
        """Do nothing: processes are ended by their starter."""


class Namespaces:
    """A network namespace for each program, joined by links of a given rate."""

    def __init__(self, rate: str, names: Sequence[str]) -> None:
        self.kinds = frozenset(LASTS_S)
        self.missing = ""
        self._resources = contextlib.ExitStack()
        self._net = self._resources.enter_context(Net())
        try:
            self._hosts = {name: self._host(name, rate) for name in ("hub", *names)}
        except BaseException:
            self._resources.close()
            raise
        self.listen, self.address = f"tcp://0.0.0.0:{PORT}", f"tcp://{self._hosts['hub'].address}:{PORT}"

    def _host(self, name: str, rate: str) -> Host:
        host = self._net.host(name)
        host.shape(up=rate, down=rate)
        return host

    def start(
        self, host: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return start_process(["ip", "netns", "exec", self._hosts[host].namespace, *argv], log, env)

    def rate_options(self) -> list[str]:
        return []

    def cut(self, host: str, down: bool) -> None:
        machine = self._hosts[host]
        ns.ip_batch(machine._switch, [f"link set {machine._port} {'down' if down else 'up'}"])

    def hole(self, host: str, closed: bool) -> None:
        for chain in ("INPUT", "OUTPUT"):
            rule = ("iptables", "--wait", "-A" if closed else "-D", chain, "-j", "DROP")
            ns.command("ip", "netns", "exec", self._hosts[host].namespace, *rule)

    def close(self) -> None:
        self._resources.close()


def prepare(rate: str, names: Sequence[str], *, loopback: bool) -> Infrastructure:
    """Return namespaces if this machine has them, else loopback."""
    return Loopback(rate) if loopback or why_no_lab() else Namespaces(rate, names)


# -- disks ---------------------------------------------------------------------------------------


@functools.cache
def may_mount() -> bool:
    """Return whether this process may mount, by trying: the root user of a container often may not."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([*MOUNT, "size=1m", "chaos", folder], capture_output=True)
        if tried.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
        return tried.returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system of its own on `folder`, if that is permitted."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not may_mount():
        yield
        return
    subprocess.run([*MOUNT, f"size={size},mode=0700", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write files until the file system of `folder` is full."""
    with contextlib.suppress(OSError), (folder / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
    with contextlib.suppress(OSError), (folder / f"{FILLER}-last").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0")


def free_space(folder: Path) -> None:
    """Remove the files of `fill`."""
    for name in (FILLER, f"{FILLER}-last"):
        (folder / name).unlink(missing_ok=True)


# -- processes -----------------------------------------------------------------------------------


def is_running(pid: int, word: str) -> bool:
    """Return whether this process runs and has the word on its command line, because ids are reused."""
    with contextlib.suppress(OSError):
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and ns.alive(pid)
    return False


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate processes with their children, and kill those that do not end."""
    for number, timeout_s in (
        (signal.SIGTERM, EXIT_TIMEOUT_S),
        (signal.SIGKILL, EXIT_TIMEOUT_S),
    ):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)


CLI = (sys.executable, "-m", "gridtrain.cli")
