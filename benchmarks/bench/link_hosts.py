"""The hosts on which cells are measured: namespaces with shaped links, or this machine's loopback.

All groups of a link, gridtrain's and rivals', share the hosts: rank r of each is on the host worker-(r+1), so
that they have the same links.

    hub        eth0 10.77.0.2      the coordinators of gridtrain's groups, each on a port of its own
    worker-1   eth0 10.77.0.3      rank 0 of every rival
    worker-2   eth0 10.77.0.4
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.cells import Link
from gridtrain.errors import ConfigError
from gridtrain.tools.bench.bench_group import LocalHost
from lab import arrivals
from lab.net import Host, Net, why_not

FIRST_PORT = 7700


class Namespaces:
    """A network namespace for the coordinators and for each rank, with links of one kind."""

    def __init__(self, net: Net, link: Link) -> None:
        self.interface = Host.interface
        self.limit = ""
        self._ports = itertools.count(FIRST_PORT)
        names = ("hub", *(f"worker-{number}" for number in range(1, link.workers + 1)))
        self._hosts = {name: net.host(name) for name in names}
        for host in self._hosts.values():
            host.shape(up=link.rate, down=link.rate, delay_s=link.delay_s, loss=link.loss)

    def listen(self) -> tuple[str, str]:
        port = next(self._ports)
        return f"tcp://0.0.0.0:{port}", f"tcp://{self._hosts['hub'].address}:{port}"

    def member_listen(self) -> str:
        return ""

    def address(self, host: str) -> str:
        return self._hosts[host].address

    def run(
        self, host: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return self._hosts[host].run(argv, log.parent, env=env, log=log.name)


def why_no_link(link: Link) -> str:
    """Return why this machine cannot provide a link; empty if it can."""
    return why_not() or (arrivals.why_not() if link.delay_s or link.loss else "")


@contextlib.contextmanager
def hosts_of(link: Link, *, loopback: bool = False) -> Iterator[Namespaces | LocalHost]:
    """Provide the hosts of a link.

    Args:
        loopback: whether to use loopback, where members limit their own rates and there is no delay.

    Raises `ConfigError` if this machine cannot provide the link.
    """
    if loopback:
        if link.delay_s or link.loss or link.congestion:
            raise ConfigError(f"{link}: loopback has neither delay nor loss", remedy="use namespaces (root)")
        yield LocalHost(link.rate)
        return
    if reason := why_no_link(link):
        raise ConfigError(f"{link}: {reason}", remedy="measure on Linux as root, or with --loopback")
    with Net(congestion=link.congestion) as net:
        yield Namespaces(net, link)
