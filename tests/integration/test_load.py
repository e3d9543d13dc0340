"""Load: a member that sends garbage at line rate, and 1,500 strangers that connect.

Bounds that hold on any machine; `python -m hostile` measures what it really costs (docs/reliability.md).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridtrain.network.transport.identity import Identity
from hostile.group import HostileGroup, Peaks
from hostile.wire import CurveConnection, Refused

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not os.environ.get("GRIDTRAIN_HOSTILE"), reason="minutes at full load; run it with `make hostile`"
    ),
]

HONEST = ("anna", "bert", "carl")
QUIET_S, ATTACK_S = 3.0, 6.0
MIN_PROGRESS = 0.5
"""Fraction of the speed before the attack; the attacker uses some of the cores, too."""

MEMORY_MIB = 100.0

CONNECTIONS, HANDSHAKES_PER_S = 1500, 200
JOIN_S = 5.0
DESCRIPTORS = 1200
"""File descriptors of the coordinator: fewer than there are silent connections."""


def test_garbage_at_line_rate_for_the_whole_run(tmp_path: Path) -> None:
    with HostileGroup(tmp_path, workers=3) as group:
        for name in HONEST:
            group.add_honest(name)
        gate = group.gate()
        orders = {"gates": [gate.path], "forever": True}
        mallory = group.attack("mallory", ["garbage"], nice=19, orders=orders)
        peaks = Peaks(group.warm(5, mallory))
        began_s = time.monotonic()
        group.wait_until(began_s + QUIET_S)
        gate.open()
        group.wait_for("the end of her membership", lambda: bool(mallory.marked("over")))
        stranger_s = time.monotonic()  # from now on it tries to connect to every peer
        group.wait_until(stranger_s + ATTACK_S)
        quiet = group.steps_between(began_s, began_s + QUIET_S) / QUIET_S
        attacked = group.steps_between(stranger_s, stranger_s + ATTACK_S) / ATTACK_S
        growth_mib = peaks.growth_mib()
        print(f"{quiet:.1f} steps a second before, {attacked:.1f} under attack; memory {growth_mib}")
        assert attacked >= MIN_PROGRESS * quiet
        assert len(growth_mib) == 4 and max(growth_mib.values()) <= MEMORY_MIB
        assert {len(models) for models in group.digests().values()} == {1}


# -- strangers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileGroup]:
    with HostileGroup(tmp_path_factory.mktemp("coordinator"), workers=1, descriptors=DESCRIPTORS) as group:
        yield group


@pytest.mark.parametrize(
    ("kind", "count"),
    [("silent", CONNECTIONS), ("greeting", CONNECTIONS), ("handshakes", HANDSHAKES_PER_S)],
)
def test_strangers_do_not_delay_an_honest_join(coordinator: HostileGroup, kind: str, count: int) -> None:
    peaks = Peaks({"coordinator": coordinator.coordinator.pid})
    attacker = coordinator.connect(kind, kind, count)
    argv = (sys.executable, "-m", "hostile.newcomer", coordinator.invitation(), "3")
    newcomer = coordinator.run(f"newcomer-{kind}", *argv)
    coordinator.wait_for("the newcomer", lambda: newcomer.code is not None)
    attacker.end()
    took_s = [line["took_s"] for line in newcomer.marked("joined")]
    print(took_s, peaks.growth_mib())
    assert len(took_s) == 3 and max(took_s) < JOIN_S, newcomer.tail()
    assert peaks.growth_mib()["coordinator"] <= MEMORY_MIB


def test_among_silent_connections_even_a_stranger_is_refused_at_once(coordinator: HostileGroup) -> None:
    attacker = coordinator.connect("silent", "silent", CONNECTIONS)
    host, _, port = coordinator.server().rpartition(":")
    with pytest.raises(Refused):
        CurveConnection(Identity.generate(), coordinator.key(), host, int(port), timeout_s=JOIN_S)
    attacker.end()
