"""Accusations that the coordinator records, and what they lead to."""

from __future__ import annotations

import pytest

from gridtrain_coordinator.access import accusations as module
from gridtrain_coordinator.access.accusations import ViolationLog, ViolationRecord

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


def by(accuser: bytes | None) -> ViolationRecord:
    return ViolationRecord(accuser, "sent rubbish")


def test_a_new_accused_member_replaces_the_oldest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCUSED", 2)
    log = ViolationLog()
    assert all(log.add(accused, by(D)) for accused in (A, B, A))
    assert log.accused_members() == [A, B]
    assert log.add(C, by(None)) and log.accused_members() == [B, C]


def test_removing_an_accuser_withdraws_its_accusations_only() -> None:
    log = ViolationLog()
    for accuser in (D, C, D):
        log.add(A, by(accuser))
    log.add(B, by(D))
    log.withdraw_accusations(D)
    assert log.accused_members() == [A] and list(log.records_of(A)) == [by(C)]
    assert log.accused_by(D) == []


def test_the_accusations_of_one_accuser_are_limited_independently_of_others() -> None:
    log = ViolationLog()
    for _ in range(module.VIOLATIONS_BEFORE_REMOVAL):
        assert log.add(A, by(C)) and log.add(A, by(D))
    assert not log.add(A, by(C)) and not log.add(A, by(A))
    assert len(log.records_of(A)) == 2 * module.VIOLATIONS_BEFORE_REMOVAL
    assert log.members_over_limit() == [A]
