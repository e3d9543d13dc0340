"""Resolves host names that have only IPv6 addresses, and limits how long the caller waits for DNS.

libzmq resolves names only to IPv4 addresses, unless IPv6 is enabled; then it prefers IPv6 addresses, at which
a coordinator may not be listening.  Therefore a name that has an IPv4 address is left to libzmq, and a name
that has only IPv6 addresses is replaced:

    tcp://lab.example:7700    A 192.0.2.7, AAAA 2001:db8::7   unchanged
    tcp://home.example:7700   AAAA 2001:db8::9                tcp://[2001:db8::9]:7700

A lookup may take many seconds if a name server does not answer, and the caller is a loop that must not block.
Therefore the caller waits only briefly, and a later attempt uses the result.
"""

from __future__ import annotations

import ipaddress
import socket
import threading

CONNECT_WAIT_S = 0.2
BIND_WAIT_S = 10.0
MAX_NAMES = 256
MAX_LOOKUPS = 8


class NameLookup:
    """Looks up names in the background and stores the latest results.  Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ipv6_only: dict[str, str] = {}  # by name: the first address, or "" if it is not IPv6-only
        self._running: set[str] = set()

    def ipv6_address(self, host: str, wait_s: float) -> str:
        """Return the first address of a name that has only IPv6 addresses.

        Returns "" for all other names and for IP addresses.  If the lookup takes longer than `wait_s`, the
        result of an earlier lookup is returned, or "" if there is none.
        """
        if not host or host == "*" or _is_address(host):
            return ""
        with self._changed:
            if host not in self._running:
                if len(self._running) >= MAX_LOOKUPS:
                    return self._ipv6_only.get(host, "")
                self._running.add(host)
                threading.Thread(
                    target=self._look_up, args=(host,), name="gridtrain-names", daemon=True
                ).start()
            self._changed.wait_for(lambda: host not in self._running, wait_s)
            return self._ipv6_only.get(host, "")

    def _look_up(self, host: str) -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        is_ipv6_only = bool(found) and all(family == socket.AF_INET6 for family, *_ in found)
        with self._changed:
            self._running.discard(host)
            self._ipv6_only.pop(host, None)
            self._ipv6_only[host] = str(found[0][4][0]) if is_ipv6_only else ""
            if len(self._ipv6_only) > MAX_NAMES:
                del self._ipv6_only[next(iter(self._ipv6_only))]
            self._changed.notify_all()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
