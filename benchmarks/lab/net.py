"""Hosts, home routers and the internet between them, as namespaces that exist as long as the `with` block.

    with Net() as net:                             namespace of the internet: a bridge, 10.77.0.0/24
        hub = net.host("hub")                          |-- hub   eth0 10.77.0.2
        home = net.router("home")                      |-- home  wan 10.77.0.3, lan 192.168.1.1, NAT
        anna = home.host("anna")                       |     |-- anna  eth0 192.168.1.2
        bert = home.host("bert")                       |     `-- bert  eth0 192.168.1.3
        home.shape(up="20Mbit", down="100Mbit")
        hub.run(["python", "-m", "http.server"], folder)

Two labs at the same time use the same addresses without conflict, because each has its own internet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.runtime.process_hooks import install_sigterm_handler
from gridtrain.tools.child_processes import end_processes
from lab import link, ns
from lab.link import Arrivals, End
from lab.ns import LabError

INTERNET = "10.77.0"
BRIDGE = "br0"
LAN, WAN = "lan", "wan"
"""The names of a router's two interfaces."""

NAT_RULES = (
    f"-t nat -A POSTROUTING -o {WAN} -j MASQUERADE",
    "-P FORWARD DROP",
    "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    f"-A FORWARD -i {LAN} -j ACCEPT",
    "-A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    f"-A INPUT -i {WAN} -j DROP",
)
"""Rules of a home router: the LAN reaches everything under the router's address, and answers come back.  All
other packets that arrive by wan are dropped without an answer, as home routers do."""

MAX_HOSTS = 250  # of one bridge: the last byte of a /24
STOP_GRACE_S = 5.0
_ports = itertools.count(1)
_labs = itertools.count(1)

T = TypeVar("T")


class Host:
    """A machine with one link, which ends at `interface` here and at a port of the bridge in `_switch`."""

    interface = "eth0"
    inner: tuple[str, ...] = ()

    def __init__(self, net: Net, name: str, address: str, switch: str, gateway: str = "") -> None:
        self.net, self.name, self.address = net, name, address
        self.namespace = net._add(name)
        self._switch, self._port = switch, f"port{next(_ports)}"
        ends = f"name {self.interface} type veth peer name {self._port} netns {switch}"
        ns.ip_batch(self.namespace, [f"link add {ends}"])
        ns.ip_batch(switch, [f"link set {self._port} master {_bridge_of(switch, net)} up"])
        lines = [f"addr add {address}/24 dev {self.interface}", f"link set {self.interface} up"]
        ns.ip_batch(self.namespace, lines + ([f"route add default via {gateway}"] if gateway else []))
        self._near, self._far = End(self.namespace, self.interface), End(switch, self._port)
        self._arrivals = Arrivals(self._near, self.inner, self._start)

    def shape(self, *, up: str = "", down: str = "", delay_s: float | None = None) -> None:
        """Change the link's rate in each direction, such as "20Mbit", and its delay.

        Settings that are empty or None do not change.

        Args:
            delay_s: of packets to this host: between two hosts with 20 ms each, a packet takes 20 ms and a
                round trip takes 40.  A router also delays packets that leave its home.

        Raises `LabError`, `ValueError`, `ConfigError`.
        """
        for end, rate in ((self._near, up), (self._far, down)):
            if rate:
                end.limit(parse_rate(rate))
        if delay_s is not None and delay_s != self._arrivals.delay_s:
            if reason := link.why_not():
                raise LabError(reason)
            self._arrivals.set(delay_s)

    def cut(self, down: bool) -> None:
        """Take the link down, or up again."""
        ns.ip_batch(self._switch, [f"link set {self._port} {'down' if down else 'up'}"])

    def drop_packets(self, on: bool, others: Collection[Host] = ()) -> None:
        """Drop all packets in both directions without an answer, or pass them again.

        Args:
            others: the hosts to and from which packets are dropped; empty: all.
        """
        for address in [other.address for other in others] or ["0.0.0.0/0"]:
            for chain, end in (("INPUT", "--source"), ("OUTPUT", "--destination")):
                self.command("iptables", "--wait", "-A" if on else "-D", chain, end, address, "-j", "DROP")

    def command(self, *argv: str) -> str:
        """Run a short command here; return its stdout.  Raises `LabError`."""
        return ns.command("ip", "netns", "exec", self.namespace, *argv)

    def _start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program of the lab itself, by default with pipes as its output."""
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        try:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *argv],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **outputs,
            )
        except OSError as error:
            raise LabError(f"{argv[0]} cannot be started on {self.name}: {error.strerror}") from None
        self.net._processes.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        log: str = "",
        hostname: str = "",
    ) -> subprocess.Popen[bytes]:
        """Start a process here, with output in `folder/LOG.out` and `folder/LOG.err`; it ends with the lab.

        Args:
            env: its whole environment; None: this process's.
            log: the name of the two files; default: the host's name.
            hostname: the host name for the process and its children; default: the host's name.

        Raises `LabError` if the program cannot be started.
        """
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (folder / f"{log or self.name}.{kind}" for kind in ("out", "err"))
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hostname or self.name]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            whole = None if env is None else dict(env)
            return self._start([*named, *argv], stdout=stdout, stderr=stderr, env=whole)

    def inside(self, action: Callable[[], T]) -> T:
        """Call `action` in a thread on this host; its sockets stay here.  Raises what it raises."""
        return ns.inside(self.namespace, action)

    def listen(self, port: int = 0) -> socket.socket:
        """Return a TCP socket that listens on all addresses of this host."""
        return self.inside(lambda: socket.create_server(("", port)))

    def dial(self, address: str, port: int, timeout_s: float = 5.0) -> socket.socket:
        """Open a TCP connection from this host.  Raises `OSError`: refused, unreachable or timed out."""
        return self.inside(lambda: socket.create_connection((address, port), timeout_s))


class Router(Host):
    """A home router, whose link to the internet is `wan` and whose bridge is `lan`.

    All hosts behind it have its `address` on the internet.
    """

    interface = WAN
    inner = (LAN,)

    def __init__(self, net: Net, name: str, address: str, subnet: str, translate: bool) -> None:
        super().__init__(net, name, address, net.internet)
        self.subnet = subnet
        self._numbers = itertools.count(2)
        gateway = [f"addr add {subnet}.1/24 dev {LAN}", f"link set {LAN} up"]
        ns.ip_batch(self.namespace, [f"link add {LAN} type bridge", *gateway])
        ns.write_sysctls(self.namespace, {"net/ipv4/ip_forward": "1"})
        for rule in NAT_RULES if translate else ():
            self.command("iptables", "--wait", *rule.split())

    def host(self, name: str) -> Host:
        """Make a machine behind this router.  Raises `LabError`."""
        number = _next_number(self._numbers, f"behind router {self.name}")
        return Host(self.net, name, f"{self.subnet}.{number}", self.namespace, f"{self.subnet}.1")


class Net:
    """Hosts and home routers that share an internet, until the `with` ends.

    From its begin on, SIGTERM raises `SystemExit`, if the signal has no other handler, so that `with` blocks
    are left in order; the remains of a process that was killed are removed when the next lab begins.
    """

    def __init__(self) -> None:
        self.internet = ""
        self._tag = f"{ns.owner_tag()}-{next(_labs)}"
        self._namespaces: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count(2)
        self._subnets = itertools.count(1)

    def __enter__(self) -> Net:
        install_sigterm_handler()
        try:
            ns.sweep()
            self.internet = self._add("internet")
            ns.ip_batch(self.internet, [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def host(self, name: str) -> Host:
        """Make a machine with a public address.  Raises `LabError`."""
        return Host(self, name, self._next_address(), self.internet)

    def make_hosts(self, names: Sequence[str], rate: str = "", delay_s: float = 0.0) -> dict[str, Host]:
        """Make machines with the same links: rate in each direction, and delay; see `Host.shape`."""
        made = {name: self.host(name) for name in names}
        for host in made.values():
            host.shape(up=rate, down=rate, delay_s=delay_s)
        return made

    def router(self, name: str, *, translate: bool = True, subnet: str = "") -> Router:
        """Make a home router.  Raises `LabError`.

        Args:
            translate: whether it has NAT; without, it forwards in both directions (and other hosts need a
                route to the subnet).
            subnet: the first three bytes of its LAN's addresses; default: 192.168.1, 192.168.2, ...
        """
        subnet = subnet or f"192.168.{_next_number(self._subnets, 'as subnets')}"
        return Router(self, name, self._next_address(), subnet, translate)

    def close(self) -> None:
        """End all processes and remove all namespaces; a second call does nothing.

        Raises `LabError` if something cannot be removed.
        """
        with _undisturbed():
            end_processes(self._processes, (STOP_GRACE_S,))
            self._processes.clear()  # children of ended processes end with the namespace
            ns.remove(self._namespaces)
            self._namespaces.clear()

    def _add(self, name: str) -> str:
        namespace = f"{self._tag}-{name}"
        if namespace in self._namespaces:
            raise LabError(f"there already is a host {name!r}")
        self._namespaces.append(namespace)  # before it exists, so that an exception leaves none behind
        ns.add(namespace)
        return namespace

    def _next_address(self) -> str:
        return f"{INTERNET}.{_next_number(self._numbers, 'on the internet')}"


def _bridge_of(switch: str, net: Net) -> str:
    return BRIDGE if switch == net.internet else LAN


def _next_number(numbers: Iterator[int], where: str) -> int:
    number = next(numbers)
    if number > MAX_HOSTS:
        raise LabError(f"more than {MAX_HOSTS} {where}")
    return number


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the clean-up, which is short, has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {
        n: signal.signal(n, lambda number, frame: received.append(number)) for n in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


# -- requirements ----------------------------------------------------------------------------------


@functools.cache
def why_not() -> str:
    """Return why a lab is not possible on this machine; empty if it is.  Takes a fifth of a second."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "not root: network namespaces need it"
    for program in ("ip", "tc", "unshare", "iptables"):
        if shutil.which(program) is None:
            packages = "iproute2 util-linux iptables"
            return f"there is no command {program!r} (on Debian or Ubuntu: apt install {packages})"
    try:
        with Net() as net:
            net.router("try").host("it").shape(up="1Mbit", down="1Mbit")
    except LabError as error:
        return str(error)
    return ""
