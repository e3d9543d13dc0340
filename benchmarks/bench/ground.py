"""Where cells are measured: namespaces with shaped cables, or this machine's loopback.

Decides who sits on which host.  All groups of a link, ours and rivals', share the hosts: rank r of each is on
the host worker-(r+1), so that they have the same cables.

    hub        eth0 10.77.0.2      the coordinators of our groups, each on a port of its own
    worker-1   eth0 10.77.0.3      rank 0 of every rival
    worker-2   eth0 10.77.0.4
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.cells import Link
from gridtrain.errors import ConfigError
from gridtrain.tools.bench.bench_group import LocalHost
from lab.net import Host, Net, why_not

FIRST_PORT = 7700


class Namespaces:
    """See the module's text."""

    def __init__(self, net: Net, link: Link) -> None:
        self.interface = Host.interface
        self.limit = ""
        self._ports = itertools.count(FIRST_PORT)
        names = ("hub", *(f"worker-{number}" for number in range(1, link.workers + 1)))
        self._hosts = {name: net.host(name) for name in names}
        for host in self._hosts.values():
            shape(host, link)

    def listen(self) -> tuple[str, str]:
        port = next(self._ports)
        return f"tcp://0.0.0.0:{port}", f"tcp://{self._hosts['hub'].address}:{port}"

    def member_listen(self) -> str:
        return ""

    def address(self, who: str) -> str:
        return self._hosts[who].address

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return self._hosts[who].run(argv, log.parent, env=env, log=log.name)


def why_no_link(link: Link) -> str:
    """Why this machine has no such link; empty: it has."""
    if reason := why_not():
        return reason
    known = inspect.signature(Host.shape).parameters
    if link.delay_s and "delay_s" not in known:
        return "this lab cannot delay"
    if link.loss and "loss" not in known:
        return "this lab cannot lose frames"
    return ""


def shape(host: Host, link: Link) -> None:
    """The lab delays what comes to a host: two hosts with 20 ms each are 20 ms apart."""
    more: dict[str, float] = {}
    if link.delay_s:
        more["delay_s"] = link.delay_s
    if link.loss:
        more["loss"] = link.loss
    host.shape(up=link.rate, down=link.rate, **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def ground_of(link: Link, *, loopback: bool = False) -> Iterator[Namespaces | LocalHost]:
    """The hosts of a link.

    Args:
        loopback: this machine's, where rates are the members' own limits and there is no delay.

    Raises `ConfigError`: this machine has no such link.
    """
    if loopback:
        if link.delay_s or link.loss or link.congestion:
            raise ConfigError(f"{link}: a loopback neither delays nor loses", remedy="use namespaces (root)")
        yield LocalHost(link.rate)
        return
    if reason := why_no_link(link):
        raise ConfigError(f"{link}: {reason}", remedy="measure on Linux as root, or with --loopback")
    with Net(congestion=link.congestion) as net:
        yield Namespaces(net, link)
