"""A link's rate: a token bucket at the sending end of each direction of a virtual Ethernet pair.

    host eth0 --tbf up--> ======= link ======= <--tbf down-- the bridge's port

Segmentation offload makes frames of 64 KiB on such pairs, which a bucket of 32 KiB would drop.  So up to
200 Mbit/s offloads are switched off; above, where they are needed, the bucket is larger.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from ctypes import addressof, create_string_buffer

from lab.ns import LabError, command, inside

SLOW_BPS = 25_000_000
"""Bytes per second up to which offloads are switched off: 200 Mbit/s."""

LATENCY_MS = 50
"""The longest time of a frame in the queue of the bucket; further frames are dropped, and TCP slows down."""

_UNITS_BIT = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO


def rate_Bps(text: str) -> float:
    """Return a rate such as "20Mbit" in bytes per second (2.5e6).  Raises `ValueError`."""
    found = re.fullmatch(r"([0-9.]+) ?(kbit|mbit|gbit)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a rate such as 20Mbit (kbit, Mbit, Gbit)")
    return float(found[1]) * _UNITS_BIT[found[2]] / 8


def limit(namespace: str, interface: str, rate: str, parent: str = "root") -> None:
    """Limit the rate at which frames leave the interface; an earlier limit is replaced.

    Args:
        parent: the class of another queueing discipline, such as "1:1", below which the limit is placed.

    Raises `LabError`, `ValueError`.
    """
    speed_Bps = rate_Bps(rate)
    slow = speed_Bps <= SLOW_BPS
    bucket = ["rate", f"{round(speed_Bps * 8)}bit", "burst", "32kb" if slow else "256kb"]
    place = ["root"] if parent == "root" else ["parent", parent]
    tbf = ["dev", interface, *place, "tbf", *bucket, "latency", f"{LATENCY_MS}ms"]
    command("tc", "-n", namespace, "qdisc", "replace", *tbf)
    offloads(namespace, interface, not slow)


def offloads(namespace: str, interface: str, on: bool) -> None:
    """Allow or forbid the interface to send frames longer than its MTU.  Raises `LabError`."""
    inside(namespace, lambda: _set_offloads(interface, on))


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
