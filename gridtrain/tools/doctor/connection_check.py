"""Doctor's checks of the coordinator: its host name, its port, and whether its clock agrees with ours.

    1. resolve the host name              fails if the name is unknown
    2. connect over TCP                   fails if the address refuses or does not answer
    3. handshake (CURVE) with the         refused if the invitation is not valid; no answer if another program
       invitation's key                   or a coordinator with another key listens on the port
    4. status                             warns if this machine's clock differs from the coordinator's
    5. round trips, bursts, dial-back

`doctor_probe` does steps 3 to 5, except the comparison of clocks.  Doctor does not enrol a key, so the
invitation keeps all its uses; the handshake alone shows whether it is valid.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from gridtrain.core.group.invitation import Invitation
from gridtrain.tools.doctor.findings import Finding, failure, ok, warning

RESOLVE_TIMEOUT_S = 4.0
CONNECT_TIMEOUT_S = 4.0
MAX_ADDRESSES = 4
SLOW_ROUND_TRIP_S = 0.25
MAX_SKEW_S = 5.0

_REFUSED = (errno.ECONNREFUSED,)
_UNREACHABLE_ERRNOS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)


SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]
"""The family of an address, and the argument of `socket.connect`."""


def run_with_timeout(work: Callable[[], object], limit_s: float) -> object:
    """Call `work` in a thread; return its result, the exception that it raised, or a `TimeoutError`.

    The `TimeoutError` is returned after `limit_s`.  The call is not cancelled then: if it hangs, for instance
    because a name server does not answer, its daemon thread remains.
    """
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answers.get(timeout=max(0.001, limit_s))
    except queue.Empty:
        return TimeoutError(f"no answer within {limit_s:.1f} s")


def check_name(invitation: Invitation, addresses: list[SocketAddress], limit_s: float) -> Finding:
    """Resolve the coordinator's host name, and add its addresses to the list."""
    parts = urlsplit(invitation.address)
    host, port = parts.hostname or "", parts.port or 0
    limit_s = min(RESOLVE_TIMEOUT_S, limit_s)
    found = run_with_timeout(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), limit_s)
    if isinstance(found, TimeoutError):
        fix = "check this machine's network, or ask for an invitation with a numeric address"
        return failure("name", f"no name server answered for {host} within {limit_s:.1f} s", fix, host=host)
    if isinstance(found, Exception) or not isinstance(found, list):
        fix = "check the network, or ask the run's owner for an invitation with a numeric address"
        why = getattr(found, "strerror", None) or found
        return failure("name", f"{host} cannot be resolved on this machine: {why}", fix, host=host)
    addresses += [(family, place) for family, _, _, _, place in found[:MAX_ADDRESSES]]
    named = ", ".join(dict.fromkeys(str(place[0]) for _, place in addresses))
    return ok(
        "name",
        f"{host} resolves to {named}" if named != host else f"{host}, port {port}",
        host=host,
        port=port,
    )


def check_tcp(invitation: Invitation, addresses: list[SocketAddress], limit_s: float) -> Finding:
    """Connect to the addresses in turn until one accepts.

    Each address that is left gets an equal part of the remaining time.
    """
    errors: list[OSError] = []
    limit_s = min(CONNECT_TIMEOUT_S, limit_s)
    until_s = time.monotonic() + limit_s
    for index, (family, place) in enumerate(addresses):
        began_s = time.monotonic()
        part_s = max(0.05, (until_s - began_s) / (len(addresses) - index))
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(part_s)
                probe.connect(place)
            took_s = time.monotonic() - began_s
            return ok("port", f"{invitation.address} accepts connections", connect_s=took_s)
        except OSError as error:
            errors.append(error)
    where = invitation.address
    if any(isinstance(error, TimeoutError) for error in errors):
        fix = (
            "ask the run's owner to open or forward the port, which a firewall seems to block; "
            "or check whether this network allows outgoing connections"
        )
        return failure("port", f"{where} did not answer within {limit_s:.1f} s", fix)
    if any(error.errno in _REFUSED for error in errors):
        fix = "ask the run's owner whether `gridtrain coordinator` is running and listens on that port"
        return failure("port", f"no program is listening on {where}", fix)
    why = "; ".join(sorted({error.strerror or str(error) for error in errors}))
    fix = "check this machine's network"
    if any(error.errno in _UNREACHABLE_ERRNOS for error in errors):
        fix = "check this machine's network, and whether the address belongs to another network"
    return failure("port", f"{where} cannot be reached: {why}", fix)


def check_clock(theirs_s: float | None, ours_s: float) -> Finding:
    """Compare this machine's clock with the coordinator's; `theirs_s` is None if the coordinator did not
    report its time."""
    if theirs_s is None:
        return ok("clock", "not compared, because the coordinator did not report its time")
    skew_s = ours_s - theirs_s
    text = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the coordinator's"
    if abs(skew_s) > MAX_SKEW_S:
        fix = "switch on time synchronization, which logs and invitations need, but training does not"
        return warning("clock", text, fix, skew_s=skew_s)
    return ok("clock", text, skew_s=skew_s)
