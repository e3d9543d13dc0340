"""Where the programs run, and how each kind of fault is done there.

Decides nothing about the schedule.  Whatever it has started or mounted is gone when the `with` is left.

    Namespaces   a host for the coordinator and each worker, cables of a given rate (`lab.net`); needs root
                 cut: the cable's other end goes down.  hole: packets are dropped both ways, in silence
    Loopback     processes beside each other, rates by the workers' own caps; no cut, no hole
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
HUB_DISK, WORKER_DISK = "24m", "24m"
GRACE_S = 5.0
FILLER = "filler"


class Ground(Protocol):
    """Attributes:
    address: where the coordinator listens, and workers find it.
    rate: what each cable carries; "": nothing limits it.
    """

    kinds: frozenset[str]
    listen: str
    address: str
    missing: str

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program on the host of `who`; its output is added to `log`.out and `log`.err."""
        ...

    def cap(self) -> list[str]:
        """Options of `gridtrain worker` for the rate."""
        ...

    def cut(self, who: str, down: bool) -> None: ...

    def hole(self, who: str, closed: bool) -> None: ...

    def close(self) -> None: ...


def begin(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with Path(f"{log}.out").open("ab") as out, Path(f"{log}.err").open("ab") as err:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(env), start_new_session=True
        )


class Loopback:
    """See the module's text."""

    def __init__(self, rate: str) -> None:
        self.kinds = frozenset(LASTS_S) - NETWORK - (frozenset() if may_mount() else DISK)
        self.missing = why_no_lab() or "--loopback was given"
        self._rate = rate
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.listen = self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return begin(argv, log, env)

    def cap(self) -> list[str]:
        return ["--upload-limit", self._rate, "--download-limit", self._rate] if self._rate else []

    def cut(self, who: str, down: bool) -> None:
        raise NotImplementedError("a loopback cannot be cut")

    def hole(self, who: str, closed: bool) -> None:
        raise NotImplementedError("a loopback has no hole")

    def close(self) -> None:
        """Nothing: whoever started a process ends it."""


class Namespaces:
    """See the module's text."""

    def __init__(self, rate: str, names: Sequence[str]) -> None:
        self.kinds = frozenset(LASTS_S)
        self.missing = ""
        self._held = contextlib.ExitStack()
        self._net = self._held.enter_context(Net())
        try:
            self._hosts = {name: self._host(name, rate) for name in ("hub", *names)}
        except BaseException:
            self._held.close()
            raise
        self.listen, self.address = f"tcp://0.0.0.0:{PORT}", f"tcp://{self._hosts['hub'].address}:{PORT}"

    def _host(self, name: str, rate: str) -> Host:
        host = self._net.host(name)
        host.shape(up=rate, down=rate)
        return host

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return begin(["ip", "netns", "exec", self._hosts[who].namespace, *argv], log, env)

    def cap(self) -> list[str]:
        return []

    def cut(self, who: str, down: bool) -> None:
        host = self._hosts[who]
        ns.ip_batch(host._switch, [f"link set {host._port} {'down' if down else 'up'}"])

    def hole(self, who: str, closed: bool) -> None:
        for chain in ("INPUT", "OUTPUT"):
            rule = ("iptables", "--wait", "-A" if closed else "-D", chain, "-j", "DROP")
            ns.command("ip", "netns", "exec", self._hosts[who].namespace, *rule)

    def close(self) -> None:
        self._held.close()


def prepare(rate: str, names: Sequence[str], *, loopback: bool) -> Ground:
    """The best ground that this machine has."""
    return Loopback(rate) if loopback or why_no_lab() else Namespaces(rate, names)


# -- disks ---------------------------------------------------------------------------------------


@functools.cache
def may_mount() -> bool:
    """Tried, as root alone may be too little: a container's root often may not."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([*MOUNT, "size=1m", "chaos", folder], capture_output=True)
        if tried.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
        return tried.returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own in `folder`, if we may make one."""
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
    """Until not one byte more can be written there."""
    with contextlib.suppress(OSError), (folder / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
    with contextlib.suppress(OSError), (folder / f"{FILLER}-last").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0")


def make_room(folder: Path) -> None:
    for name in (FILLER, f"{FILLER}-last"):
        (folder / name).unlink(missing_ok=True)


# -- processes -----------------------------------------------------------------------------------


def is_ours(pid: int, word: str) -> bool:
    """Whether this process runs, and has the word on its command line: ids are used again."""
    with contextlib.suppress(OSError):
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and ns.alive(pid)
    return False


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Gracefully, then not; each with its children."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


CLI = (sys.executable, "-m", "gridtrain.cli")
