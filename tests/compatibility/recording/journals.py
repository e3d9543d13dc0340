"""Records journals with every kind of entry, and what the old code read out of all recorded journals.

Written for commit 330f465; never adapted to a later one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from oldformats.positions import plain
from recording.runs import keep_state

from gridtrain.protocol import messages as m
from gridtrain.protocol.admission import _definition as definition
from gridtrain.protocol.door import Door
from gridtrain.protocol.door import recover as recover_the_door
from gridtrain.protocol.membership_io import Journal
from gridtrain.protocol.recovery import checkpoint_entry, generation_entry, recover
from gridtrain.transport.curve import Identity
from gridtrain_coordinator.keys import operator_identity
from gridtrain_coordinator.store import Store

WALL_S = 1_700_000_000.0
LATER_S = WALL_S + 10.0
NAMES = ("anna", "bert", "carl", "dora", "erik", "fred", "gina")
JOURNALS = ("interrupted", "finished", "stages", "judgements", "invented")

Write = Callable[[Path, Any], None]


def key_of(name: str) -> bytes:
    """No public key of anybody: 32 bytes that say whose they would be."""
    return name.encode().ljust(32, b".")


def record(out: Path, write: Write) -> None:
    judgements(out / "coordinator" / "judgements")
    invented(out / "coordinator" / "invented")
    found = {}
    for name in JOURNALS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal.sqlite"
            shutil.copy(out / "coordinator" / name / "journal.db", path)
            path.chmod(0o600)
            shutil.copy(out / "coordinator" / name / "coordinator.key", folder)
            store = Store.open(path)
            entries = [(entry.kind, entry.body) for entry in store.entries()]
            door = recover_the_door(entries, run=name)
            wall_s = LATER_S if name == "judgements" else _end_of(entries)
            found[name] = {
                "recovered": plain(recover(entries)),
                "key": plain(store.key()),
                "operator": plain(Identity.read(out / "coordinator" / name / "operator.key").public),
                "next term": store.next_term(),
                "wall_s": wall_s,
                "door": door.picture(wall_s),
                "standings": {
                    peer: door.standing(bytes.fromhex(peer), wall_s).value for peer in _keys_in(entries)
                },
            }
            store.close()
    write(out / "coordinator" / "read_by_the_old_code.json", found)


def _end_of(entries: Iterable[tuple[str, Any]]) -> float:
    """A minute after the latest invitation, when the one that is good for a second has expired."""
    times = [float(body["at_s"]) for kind, body in entries if kind == "invitation"]
    return max(times, default=WALL_S) + 60.0


def _keys_in(entries: Iterable[tuple[str, Any]]) -> list[str]:
    return sorted({body["peer"] for kind, body in entries if kind in ("enrolled", "expelled", "strike")})


def judgements(out: Path) -> None:
    """Strikes by members, a liar who is found out, who had been put out by it, bans, kicks, a pardon."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "journal.sqlite")
        operator = operator_identity(Path(folder) / "journal.sqlite")
        door = Door(run="judgements", operator=operator.public, coordinator=store.identity().public)
        store.next_term()
        store.append("term", {"term": 1, "run": "judgements", "software": "gridtrain 0.1.0"})
        store.append_all((entry.kind, entry.body) for entry in _decided(door))
        store.close()
        keep_state(Path(folder), out)


def invented(out: Path) -> None:
    """Entries of a run with every field in use: a commit, a partition of the model that changes, a rollback.

    Real runs leave most of these fields at their defaults.
    """
    spans = m.Span(100, 106), m.Span(112, 118)
    requeued = m.LedgerState(
        step=41, cursor=130, requeued=spans, consumed=118, skipped=6,
        holders=((key_of("anna"), spans[:1]), (key_of("bert"), ())),
    )  # fmt: skip
    blocks = tuple(m.Block(*(100 * n + i for i in range(6)), 0.25 * n, 0.5 * n, 0.125) for n in (1, 2, 3))
    model = m.StagedModel((0, 1, 3), blocks, 4, 2, 3.5, 24, False, True, 0.5, True)
    facts = (("model", "44 parameters"), ("exchange", "auto(values=fp16)"), ("stages", "2"))
    setup = m.Setup(facts, m.LedgerSpec(48, 5, epochs=3), 6, 12, stages=2, model=model)
    pieces = ((m.Span(0, 1), 0), (m.Span(1, 3), 1))
    roster = (
        m.Member(key_of("anna"), "anna", "tcp://192.0.2.1:7", 6, False),
        m.Member(
            key_of("bert"), "b\u00e4rt", "", 5, True, 0, pieces, bytes(range(32)), (b"", bytes(range(32, 64)))
        ),
    )
    decided = m.RoundId(2, 6, 40, 3)
    history, chosen = bytes(range(64, 96)), "GTopK(density=0.01)"
    view = m.View(
        2, 7, 2, m.Verdict.COMMIT, decided, 40, history, requeued, "a reason", chosen, (0, 2, 3)
    )  # fmt: skip
    early, late = (
        (step, bytes([step]) * 32, m.LedgerState(step + 1, 6 * step, (), 6 * step, 0, None))
        for step in (19, 39)
    )
    digests = {m.Span(0, 1): {bytes([1]) * 32, bytes([2]) * 32}, m.Span(1, 3): {bytes([3]) * 32}}
    state: dict[str, Any] = {"state": "training", "reason": "2 workers since step 41"}
    entries = [
        ("term", {"term": 1, "run": "invented", "software": "gridtrain 0.1.0"}),
        ("run", definition(setup)),
        ("generation", generation_entry(view, roster)),
        ("state", state),
        ("state", state | {"checkpoint": checkpoint_entry(early, digests)}),
        ("state", state | {"checkpoint": checkpoint_entry(late, digests)}),
        ("state", {**state, "state": "paused", "rollback": {"from": 40, "to": 20, "at_least": True}}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "journal.sqlite")
        store.identity()
        operator_identity(Path(folder) / "journal.sqlite")
        store.next_term()
        store.append_all(entries)
        store.close()
        keep_state(Path(folder), out)
    assert recover(entries).view == view and recover(entries).roster == roster


def _decided(door: Door) -> list[Journal]:
    entries: list[Journal] = []
    first, second = (Identity.from_secret(bytes([n]) * 32).public for n in (1, 2))
    entries += door.invite(first, len(NAMES), 1000.0, WALL_S).entries
    for name in NAMES:
        entries += door.enrol(first, key_of(name), "127.0.0.1", WALL_S).entries
    for now_s in range(3):
        entries += door.strike(key_of("bert"), "sent nonsense", key_of("anna"), float(now_s)).entries
    entries += door.strike(key_of("carl"), "sent nonsense", key_of("anna"), 3.0).entries
    entries += door.tick(60.0).entries  # nobody else has seen anything: anna is a liar, and bert is back
    entries += door.strike(key_of("dora"), "was seen by the coordinator", None, 61.0).entries
    entries += door.strike(key_of("dora"), "was seen by carl", key_of("carl"), 62.0).entries
    entries += door.expel(key_of("erik"), True, "spam", "erik").entries
    entries += door.expel(key_of("fred"), False, "too slow").entries
    entries += door.expel(key_of("gina"), True, "by mistake", "gina").entries
    entries += door.pardon(key_of("gina")).entries
    entries += door.invite(second, 3, 5.0, WALL_S).entries
    causes = [entry.body["cause"] for entry in entries if entry.kind == "expelled"]
    assert causes == ["strikes", "liar", "order", "order", "order"], causes
    return entries
