"""Resolves host names in separate threads, and stores the latest results.

libzmq gets only IP addresses.  It would resolve a name in the thread that serves all connections, and block
all of them while a name server does not answer.

    tcp://lab.example:7700    A 192.0.2.7, AAAA 2001:db8::7   tcp://192.0.2.7:7700
    tcp://home.example:7700   AAAA 2001:db8::9                tcp://[2001:db8::9]:7700
    tcp://localhost:7700      not looked up                   tcp://127.0.0.1:7700

IPv4 comes first, because a coordinator may not be listening on its IPv6 addresses.  Each attempt to connect
begins a lookup, so that a change in the host's address is noticed, and waits briefly for the result.  If the
lookup takes longer or fails, the address from an earlier lookup is used.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable

log = logging.getLogger("gridtrain")

DIAL_WAIT_S = 0.5
"""How long an attempt to connect waits for its lookup before it uses the address from an earlier lookup."""

FIRST_WAIT_S = 10.0
"""How long `NameLookup.resolve` waits for a name whose address is not known yet."""

MAX_NAMES = 256
MAX_LOOKUPS = 8


class NameLookup:
    """Looks up names in the background and stores the latest results.  Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._addresses: dict[str, str] = {}  # by name: the latest address; "" if there has been none
        self._errors: dict[str, str] = {}  # by name: why the latest lookup failed
        self._running: dict[str, set[Callable[[], None]]] = {}  # by name: what to call at the end

    def begin(self, host: str, on_end: Callable[[], None] = lambda: None) -> bool:
        """Begin a lookup, unless this name is already being looked up; return whether a lookup is running.

        The result is False for an IP address, while `MAX_LOOKUPS` other names are being looked up, and if the
        lookup cannot begin.

        Args:
            host: a host name or an IP address.
            on_end: a function that is called in another thread when the lookup has ended.
        """
        if numeric_host(host):
            return False
        with self._changed:
            if host not in self._running:
                if len(self._running) >= MAX_LOOKUPS:
                    return False
                self._running[host] = set()
                thread = threading.Thread(
                    target=self._look_up, args=(host,), name="gridtrain-names", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # this user may not start more threads
                    self._record(host, "", str(error))
                    return False
            self._running[host].add(on_end)
            return True

    def clear_problem(self, host: str) -> None:
        """Forget that lookups of a name failed, so that the next failure is logged again."""
        with self._changed:
            self._errors.pop(host, None)

    def is_running(self, host: str) -> bool:
        with self._changed:
            return host in self._running

    def address(self, host: str) -> str:
        """Return the latest known IP address of a host; "" if none is known."""
        with self._changed:
            return numeric_host(host) or self._addresses.get(host, "")

    def resolve(self, host: str) -> str:
        """Look up a name, wait for the result for a limited time, and return `address`."""
        self.begin(host)
        with self._changed:
            wait_s = DIAL_WAIT_S if self._addresses.get(host) else FIRST_WAIT_S
            self._changed.wait_for(lambda: host not in self._running, wait_s)
        return self.address(host)

    def problem(self, address: str) -> str:
        """Return why the host's IP address is unknown or may be out of date; "" if there is no problem."""
        host = address.removeprefix("tcp://").rpartition(":")[0]
        with self._changed:
            why = self._errors.get(host, "")
            if not why and host in self._running and not self._addresses.get(host):
                why = "no name server has answered yet"
        return f"the host name {host!r} cannot be resolved ({why})" if why else ""

    def _look_up(self, host: str) -> None:
        self._record(host, *_query(host, self.address(host)))

    def _record(self, host: str, address: str, error: str) -> None:
        with self._changed:
            known = self._addresses.pop(host, "")
            self._addresses[host] = address or known
            has_begun_to_fail = bool(error) and host not in self._errors
            if error:
                self._errors[host] = error
            else:
                self._errors.pop(host, None)
            if len(self._addresses) > MAX_NAMES:
                oldest = next(iter(self._addresses))
                del self._addresses[oldest]
                self._errors.pop(oldest, None)
            callbacks = self._running.pop(host)
            self._changed.notify_all()
        if has_begun_to_fail:
            log.warning(
                "the host name %r cannot be resolved (%s); check the name, and this machine's name server "
                "(DNS); %s",
                host,
                error,
                f"meanwhile its last known address, {known}, is used" if known else "trying again",
            )
        for on_end in callbacks:
            on_end()


names = NameLookup()
"""The lookups of this process.  The results are kept when a transport is closed, for example for a pause."""


def numeric_host(host: str) -> str:
    """Return the IP address that a host stands for without a lookup; "" if it is a name."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return ""
    return host


def _query(host: str, known: str) -> tuple[str, str]:
    """Return a name's first IPv4 address, or else its first IPv6 address, and ""; or "" and an error message.

    The IPv6 address is requested only if there is no IPv4 address, because some name servers never answer
    such requests.  A failure for IPv4 can mean that the name has only IPv6 addresses, unless the address from
    an earlier lookup, `known`, is an IPv4 address.
    """
    problem = ""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0]), ""
        except (OSError, UnicodeError) as error:
            problem = problem or getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) == socket.EAI_AGAIN and "." in known:
                break
    return "", problem
