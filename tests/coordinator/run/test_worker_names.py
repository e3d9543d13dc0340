"""Two workers of one name get different names, and keep them.

requests key   present               name
anna     1     -                     anna
anna     2     anna                  anna-2
anna     2     - (1 has left)        anna-2    it came back: people know it by that name
anna     3     anna-2                anna
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import LogEvent
from gridtrain.core.member.generation_entry import own_name_events
from gridtrain_coordinator.run.worker_names import MAX_REMEMBERED, WorkerNames, rename_events

ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def test_who_comes_back_is_called_as_before() -> None:
    names = WorkerNames()
    assert names.assign(ONE, "anna", ()) == "anna"
    assert names.assign(TWO, "anna", {"anna"}) == "anna-2"
    assert names.assign(TWO, "anna", ()) == "anna-2"
    assert names.assign(TWO, "anna-2", ()) == "anna-2", "it may say so itself"
    assert names.assign(THREE, "anna", {"anna-2"}) == "anna"
    assert names.assign(ONE, "anna", {"anna", "anna-2"}) == "anna-3", "its place was taken meanwhile"
    assert names.assign(ONE, "bo", {"anna"}) == "bo", "its owner calls it otherwise now"


def test_a_coordinator_that_was_restarted_hears_the_names_that_people_know() -> None:
    names = WorkerNames()
    assert names.assign(TWO, "anna-2", ()) == "anna-2" and names.assign(ONE, "anna", {"anna-2"}) == "anna"


def test_the_memory_is_bounded() -> None:
    names = WorkerNames()
    for number in range(MAX_REMEMBERED + 5):
        names.assign(number.to_bytes(32, "big"), f"w{number}", ())
    assert len(names._assigned) == MAX_REMEMBERED


def test_the_owner_is_told() -> None:
    assert rename_events("anna", "anna") == []
    (note,) = rename_events("anna", "anna-2")
    assert (note.event, note.fields["reason"]) == ("renamed", "another worker is called anna")


def roster(*names: str) -> list[m.Member]:
    return [m.Member(bytes([i]) * 32, name, "", 1, False) for i, name in enumerate(names)]


def test_both_members_say_it_once() -> None:
    alone, both = roster("anna"), roster("anna", "anna-2", "anna-2x")
    assert own_name_events("anna", (), alone, 0) == []
    assert own_name_events("anna", alone, both, 0) == [
        LogEvent("namesake", {"name": "anna", "other": "anna-2"})
    ]
    assert own_name_events("anna", (), both, 1) == [LogEvent("named", {"name": "anna-2", "asked": "anna"})]
    assert own_name_events("anna", both, both, 0) == own_name_events("anna-2", both, both, 1) == []
