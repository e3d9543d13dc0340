"""Delay and loss of the packets that arrive over a link, by the kernel's netem or without it.

Packets are delayed after they have left the sender's host, because packets that wait there count against the
sender's socket (TCP small queues), which slows bulk transfers down.

    with netem:     the bridge's port --netem (delay, loss)--tbf (rate)--> link --> host
    without netem:  the bridge's port --tbf (rate)--> link --> eth0 | mangle PREROUTING: DROP at random
                                                                    | NFQUEUE: delayed by delay.py
                                                                    v
                                                                   TCP

Between two hosts with a delay d each, a packet takes d and a round trip takes 2 d.
"""

from __future__ import annotations

import functools
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.ns import LabError, add, command, owner_tag, remove

LONGEST_DELAY_S = 1.0
READY_S = 20.0
_PROGRAM = Path(__file__).with_name("delay.py")

Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]
"""Starts a program in the host's namespace, with pipes as stdout and stderr; it ends with the lab."""


class Arrivals:
    """Delay and loss of the packets that arrive at a host, in a kernel without netem.

    Args:
        interface: the host's end of the link; packets that arrive here are delayed and lost.
        inner: other interfaces; packets that arrive here are only delayed.
    """

    def __init__(self, namespace: str, interface: str, inner: Sequence[str], start: Start) -> None:
        self._namespace, self._interface, self._inner = namespace, interface, tuple(inner)
        self._start = start
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
            raise LabError(f"delay.py did not start in {self._namespace}: {error or 'no output'}")
        return holder

    def _write_rules(self, loss: float) -> None:
        """Replace all rules of the mangle table; a router's rules are in other tables."""
        lines = ["*mangle", ":PREROUTING ACCEPT [0:0]"]
        if loss:
            chance = f"-m statistic --mode random --probability {loss:.10f}"
            lines.append(f"-A PREROUTING -i {self._interface} {chance} -j DROP")
        if self._delay_s:
            for interface in (self._interface, *self._inner):
                lines.append(f"-A PREROUTING -i {interface} -j NFQUEUE --queue-num {self._queue}")
        text = "\n".join([*lines, "COMMIT", ""])
        command("ip", "netns", "exec", self._namespace, "iptables-restore", "--wait", stdin=text)


# -- netem ---------------------------------------------------------------------------------------

BELOW_NETEM = "1:1"
NETEM_FRAMES = 1 << 17
"""The most frames in netem; its default of 1000 loses most frames of a fast link with a delay."""


@functools.cache
def netem_why_not() -> str:
    """Return why netem cannot be used; empty if it can.  Needs root."""
    namespace = f"{owner_tag()}-0-netem"
    try:
        add(namespace)
        netem(namespace, "lo", 0.001, 0.001)
    except LabError as error:
        return str(error)
    finally:
        remove([namespace])
    return ""


def netem(namespace: str, interface: str, delay_s: float, loss: float) -> None:
    """Delay and lose frames that leave this interface; its rate is set in the class `BELOW_NETEM`.

    Raises `LabError`.
    """
    how = [
        "netem",
        "limit",
        str(NETEM_FRAMES),
        "delay",
        f"{1e6 * delay_s:.0f}us",
        "loss",
        f"{100 * loss:.7f}%",
    ]
    command("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "handle", "1:", *how)


def has_netem(namespace: str, interface: str) -> bool:
    return "qdisc netem" in command("tc", "-n", namespace, "qdisc", "show", "dev", interface)


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
        tried = Arrivals(namespace, "lo", (), start)
        tried.set(0.001, 0.001)
        tried.set(0.0, 0.0)
    except LabError as error:
        return f"no netem in this kernel, and its substitute does not work: {error}"
    finally:
        remove([namespace])
    return ""
