"""Switches that disable defences of a process, to show what an attack costs without them (`make hostile`).

The product has no such switch.  A defence is a small named function or constant of a module, which is looked
up at each use; `disable_defences` replaces it by one that allows everything, and restores it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock


def _no(*_: object) -> bool:
    return False


def _none(*_: object) -> list[object]:
    return []


DEFENCES: dict[str, tuple[str, int | Callable[..., object]]] = {
    "three-strikes": ("gridtrain_coordinator.access.violations.exceeds_limit", _no),
    "liar": ("gridtrain_coordinator.access.violations.is_common_accuser", _no),
    "receive-queue": ("gridtrain.network.transport.zmq.sockets.RECEIVE_MESSAGES", 2),
    "half-open": ("gridtrain.network.transport.zmq.half_open.connections_to_close", _none),
    "hoard": ("gridtrain.network.transport.zmq.dialer.exceeds_unread", _no),
}
"""By name: the place in the product, and its replacement."""


@contextmanager
def disable_defences(*names: str) -> Iterator[None]:
    """Disable these defences inside of the block, for all threads."""
    with ExitStack() as stack:
        for place, replacement in map(DEFENCES.__getitem__, names):
            stack.enter_context(mock.patch(place, replacement))
        yield
