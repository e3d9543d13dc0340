"""A host's link: its rate in each direction, its delay and its loss.

                  up: tbf on the host's end
    host  eth0 ============================= link ============================== port of the bridge
                                                                                 down: tbf on the port
    delay, loss:  with netem on the port, above tbf; in a kernel without netem on the host, before TCP:
                  eth0 | mangle PREROUTING: DROP at random | NFQUEUE: delayed by delay.py | TCP

Packets are delayed after they have left the sender's host, because packets that wait there count against the
sender's socket (TCP small queues), which slows bulk transfers down.  Between two hosts with a delay d each, a
packet takes d and a round trip takes 2 d.

Segmentation offload makes frames of 64 KiB on virtual links, which a bucket of 32 KiB would drop.  So up to
200 Mbit/s offloads are switched off; above, where they are needed, the bucket is larger.
"""

from __future__ import annotations

import fcntl
import functools
import select
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass
from pathlib import Path

from gridtrain.network.transport.rate_limiter import parse_rate
from lab.ns import LabError, add, command, inside, owner_tag, remove

LONGEST_DELAY_S = 1.0
READY_S = 20.0
SLOW_BPS = 25_000_000
"""Bytes per second up to which offloads are switched off: 200 Mbit/s."""

LATENCY_MS = 50
"""The longest time of a frame in the queue of the bucket; further frames are dropped, and TCP slows down."""

NETEM_FRAMES = 1 << 17
"""The most frames in netem; its default of 1000 loses most frames of a fast link with a delay."""

_PROGRAM = Path(__file__).with_name("delay.py")
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO

Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]
"""Starts a program in the host's namespace, with pipes as stdout and stderr; it ends with the lab."""


def bucket_bytes(rate_Bps: float) -> int:
    """Return the bytes that a link of this rate passes at once after a pause."""
    return 32 * 1024 if rate_Bps <= SLOW_BPS else 256 * 1024


@dataclass(frozen=True, slots=True)
class End:
    """An end of a link: an interface in a namespace."""

    namespace: str
    interface: str

    def set(self, rate: str, new_rate: bool, impairment: tuple[float, float] | None) -> None:
        """Set the rate of frames that leave here, and netem's (delay, loss) unless that is None."""
        if impairment is not None:
            _netem(self, *impairment)
        if rate and (new_rate or impairment is not None):
            rate_Bps = parse_rate(rate)
            shown = command("tc", "-n", self.namespace, "qdisc", "show", "dev", self.interface)
            place = ["parent", "1:1"] if "qdisc netem" in shown else ["root"]
            bucket = ["rate", f"{round(rate_Bps * 8)}bit", "burst", f"{bucket_bytes(rate_Bps)}b"]
            tbf = ["dev", self.interface, *place, "tbf", *bucket, "latency", f"{LATENCY_MS}ms"]
            command("tc", "-n", self.namespace, "qdisc", "replace", *tbf)
            self.offloads(rate_Bps > SLOW_BPS)

    def offloads(self, on: bool) -> None:
        """Allow or forbid the interface to send frames longer than its MTU.  Raises `LabError`."""
        inside(self.namespace, lambda: _set_offloads(self.interface, on))


def _set_offloads(interface: str, on: bool) -> None:
    """Do what `ethtool -K INTERFACE tso off gso off gro off` does, for machines without it.

    Joining received frames (gro) is never switched on: it is off on a new virtual interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for name, number in _OFFLOADS.items():
            value = create_string_buffer(struct.pack("=II", number, on and name != "gro"), 8)
            request = struct.pack("16sP16x", interface.encode(), addressof(value))
            try:
                fcntl.ioctl(handle, _SIOCETHTOOL, request)
            except OSError as error:
                raise LabError(f"{name} of {interface} cannot be switched: {error.strerror}") from None


def _netem(end: End, delay_s: float, loss: float) -> None:
    where = f"qdisc replace dev {end.interface} root handle 1: netem limit {NETEM_FRAMES}"
    how = f"delay {1e6 * delay_s:.0f}us loss {100 * loss:.7f}%"
    command("tc", "-n", end.namespace, *where.split(), *how.split())


@dataclass(frozen=True, slots=True)
class Settings:
    """Rates such as "20Mbit" (empty: no limit), the delay, and the share of frames that are lost."""

    up: str = ""
    down: str = ""
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for rate in filter(None, (self.up, self.down)):
            parse_rate(rate)
        if not 0 <= self.delay_s <= LONGEST_DELAY_S:
            raise ValueError(f"delay_s is {self.delay_s}; it must be from 0 to {LONGEST_DELAY_S:g} seconds")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss is {self.loss}; it must be a share of the frames, at least 0 and below 1")


class Link:
    """The link between a host and a bridge.

    Args:
        near, far: its ends at the host and at the bridge.
        inner: a router's other interfaces, so that packets that leave its home are delayed, too.
        start: starts a program on the host.
    """

    def __init__(self, near: End, far: End, inner: Sequence[str], start: Start) -> None:
        self.settings = Settings()
        self._near, self._far, self._both = near, far, bool(inner)
        self._arrivals = Arrivals(near, inner, start)

    def change(
        self, up: str = "", down: str = "", delay_s: float | None = None, loss: float | None = None
    ) -> None:
        """Change the settings that are not empty or None.  Raises `LabError`, `ValueError`, `ConfigError`."""
        was = self.settings
        delay_s = was.delay_s if delay_s is None else delay_s
        loss = was.loss if loss is None else loss
        now = Settings(up or was.up, down or was.down, delay_s, loss)
        is_impaired = (delay_s, loss) != (was.delay_s, was.loss)
        if is_impaired and (reason := why_not()):
            raise LabError(reason)
        with_netem = is_impaired and not netem_why_not()
        if is_impaired and not with_netem:
            self._arrivals.set(delay_s, loss)
        self._far.set(now.down, bool(down), (delay_s, loss) if with_netem else None)
        self._near.set(now.up, bool(up), (delay_s, 0.0) if with_netem and self._both else None)
        if loss:
            self._far.offloads(False)
        self.settings = now


class Arrivals:
    """Delay and loss of the packets that arrive at a host, in a kernel without netem.

    Args:
        end: the host's end of the link; packets that arrive here are delayed and lost.
        inner: other interfaces; packets that arrive here are only delayed.
    """

    def __init__(self, end: End, inner: Sequence[str], start: Start) -> None:
        self._end, self._inner, self._start = end, tuple(inner), start
        self._delay_s = 0.0
        self._holder: subprocess.Popen[bytes] | None = None
        self._queue = 0

    def set(self, delay_s: float, loss: float) -> None:
        """Set the delay and the loss of arriving packets.  Raises `LabError`."""
        before = self._holder
        if delay_s != self._delay_s:
            self._queue = 1 - self._queue  # the new process is ready before the old one ends
            self._holder = self._hold(delay_s) if delay_s else None
            self._delay_s = delay_s
        self._write_rules(loss)
        if before is not None and before is not self._holder:
            before.terminate()
            before.communicate()

    def _hold(self, delay_s: float) -> subprocess.Popen[bytes]:
        holder = self._start([sys.executable, "-I", "-S", str(_PROGRAM), str(self._queue), repr(delay_s)])
        assert holder.stdout is not None
        ready, _, _ = select.select([holder.stdout], [], [], READY_S)
        if not ready or holder.stdout.readline() != b"ready\n":
            holder.kill()
            error = holder.communicate()[1].decode(errors="replace").strip()
            raise LabError(f"delay.py did not start in {self._end.namespace}: {error or 'no output'}")
        return holder

    def _write_rules(self, loss: float) -> None:
        """Replace all rules of the mangle table; a router's rules are in other tables."""
        lines = ["*mangle", ":PREROUTING ACCEPT [0:0]"]
        if loss:
            chance = f"-m statistic --mode random --probability {loss:.10f}"
            lines.append(f"-A PREROUTING -i {self._end.interface} {chance} -j DROP")
        if self._delay_s:
            for interface in (self._end.interface, *self._inner):
                lines.append(f"-A PREROUTING -i {interface} -j NFQUEUE --queue-num {self._queue}")
        text = "\n".join([*lines, "COMMIT", ""])
        command("ip", "netns", "exec", self._end.namespace, "iptables-restore", "--wait", stdin=text)


# -- requirements ----------------------------------------------------------------------------------


@functools.cache
def netem_why_not() -> str:
    """Return why netem cannot be used; empty if it can.  Needs root."""
    namespace = f"{owner_tag()}-0-netem"
    try:
        add(namespace)
        _netem(End(namespace, "lo"), 0.001, 0.001)
    except LabError as error:
        return str(error)
    finally:
        remove([namespace])
    return ""


@functools.cache
def why_not() -> str:
    """Return why delay and loss are not possible here; empty if they are.  Needs root."""
    if not netem_why_not():
        return ""
    if shutil.which("iptables-restore") is None:
        return "no netem in this kernel, and no iptables-restore (on Debian or Ubuntu: apt install iptables)"
    namespace = f"{owner_tag()}-0-queue"

    def start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
        enter = ["ip", "netns", "exec", namespace]
        pipe = subprocess.PIPE
        return subprocess.Popen([*enter, *argv], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    try:
        add(namespace)
        tried = Arrivals(End(namespace, "lo"), (), start)
        tried.set(0.001, 0.001)
        tried.set(0.0, 0.0)
    except LabError as error:
        return f"no netem in this kernel, and its substitute does not work: {error}"
    finally:
        remove([namespace])
    return ""
