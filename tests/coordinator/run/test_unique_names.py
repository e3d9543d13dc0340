"""Workers with the same name get different names, and keep them.

requests key   present               name
anna     1     -                     anna
anna     2     anna                  anna-2
anna     2     - (1 has left)        anna-2    it returned, and keeps its name
anna     3     anna-2                anna
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import LogEvent
from gridtrain.core.member.generation_entry import own_name_events
from gridtrain_coordinator.run.unique_names import MAX_REMEMBERED, WorkerNames, rename_events

ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def test_a_worker_that_returns_keeps_its_name() -> None:
    names = WorkerNames()
    assert names.assign(ONE, "anna", ()) == "anna"
    assert names.assign(TWO, "anna", {"anna"}) == "anna-2"
    assert names.assign(TWO, "anna", ()) == "anna-2"
    assert names.assign(TWO, "anna-2", ()) == "anna-2", "it may request the assigned name"
    assert names.assign(THREE, "anna", {"anna-2"}) == "anna"
    assert names.assign(ONE, "anna", {"anna", "anna-2"}) == "anna-3", (
        "its name was assigned to another worker meanwhile"
    )
    assert names.assign(ONE, "bo", {"anna"}) == "bo", "its owner has renamed it"


def test_a_restarted_coordinator_accepts_assigned_names() -> None:
    names = WorkerNames()
    assert names.assign(TWO, "anna-2", ()) == "anna-2" and names.assign(ONE, "anna", {"anna-2"}) == "anna"


def test_remembered_names_are_bounded() -> None:
    names = WorkerNames()
    for number in range(MAX_REMEMBERED + 5):
        names.assign(number.to_bytes(32, "big"), f"w{number}", ())
    assert len(names._assigned) == MAX_REMEMBERED


def test_a_renamed_worker_gets_an_event() -> None:
    assert rename_events("anna", "anna") == []
    (note,) = rename_events("anna", "anna-2")
    assert (note.event, note.fields["reason"]) == ("renamed", "another worker is called anna")


def members(*names: str) -> list[m.Member]:
    return [m.Member(bytes([i]) * 32, name, "", 1, False) for i, name in enumerate(names)]


def test_both_members_log_the_shared_name_once() -> None:
    alone, both = members("anna"), members("anna", "anna-2", "anna-2x")
    assert own_name_events("anna", (), alone, 0) == []
    assert own_name_events("anna", alone, both, 0) == [
        LogEvent("namesake", {"name": "anna", "other": "anna-2"})
    ]
    assert own_name_events("anna", (), both, 1) == [LogEvent("named", {"name": "anna-2", "asked": "anna"})]
    assert own_name_events("anna", both, both, 0) == own_name_events("anna-2", both, both, 1) == []
