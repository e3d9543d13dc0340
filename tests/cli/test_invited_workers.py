"""`gridtrain invite --until-joined`: the events that its owner sees.

0 s  -               waiting
1 s  admitted        key 010101010101 was admitted
2 s  joining         (its links are measured)
3 s  active, rank 0  anna is a member (rank 0); 1 of 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gridtrain.cli.invited_workers import JoinTimeout, await_members, print_event_on_stderr
from gridtrain.core.group.invitation import Invitation, invitation_digest
from gridtrain.errors import CoordinatorUnreachable
from gridtrain.network.transport.identity import Identity

INVITATION = Invitation("tcp://127.0.0.1:1", bytes(32), b"t" * 32, "default")
ID = invitation_digest(Identity.from_secret(INVITATION.token).public)[:8]
ANNA, BO = "01" * 32, "02" * 32


def status(
    *members: tuple[str, str, int | None], let_in: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """The status of a run that admitted these keys with the invitation, and "ff" with another one."""
    enrolled = [{"peer": peer, "invitation": ID} for peer in let_in]
    others = [{"peer": "ff" * 32, "invitation": "another!"}]
    rows = [{"peer": p, "name": f"w{p[1]}", "state": state, "rank": rank} for p, state, rank in members]
    rows.append({"peer": "ff" * 32, "name": "wf", "state": "active", "rank": 7})
    return {"door": {"enrolled": enrolled + others}, "members": rows, **more}


class Run:
    """Answers each request with the next status, one second after the one before."""

    def __init__(self, *statuses: dict[str, Any] | Exception) -> None:
        self.statuses: Iterator[dict[str, Any] | Exception] = iter(statuses)
        self.now_s = 0.0
        self.events: list[tuple[str, str]] = []

    def ask(self, timeout_s: float) -> dict[str, Any]:
        answer = next(self.statuses)
        self.now_s += 1.0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, uses: int = 1, patience_s: float = 10.0) -> list[tuple[str, str]]:
        await_members(
            self.ask, INVITATION, uses, patience_s,
            clock=lambda: self.now_s, pause=lambda length_s: None,
            say=lambda event, text, fields: self.events.append((event, text)),
        )  # fmt: skip
        return self.events


def test_a_joining_worker_is_reported_until_it_is_a_member() -> None:
    run = Run(
        status(),
        status(let_in=(ANNA,)),
        status((ANNA, "joining", None), let_in=(ANNA,)),
        status((ANNA, "active", 0), let_in=(ANNA,)),
    )
    assert run.wait() == [
        ("waiting", "waiting 10 s for workers to join (Ctrl-C stops waiting)"),
        ("let_in", "key 010101010101 was admitted; its script is starting"),
        ("member", "w1 is a member (rank 0); 1 of 1"),
    ]


def test_waiting_times_out() -> None:
    run = Run(*[status((ANNA, "admitted", None), let_in=(ANNA, BO))] * 5)
    with pytest.raises(
        JoinTimeout, match=r"^1 of 3 workers joined, 1 more was admitted within 4 s -> "
    ) as caught:
        run.wait(uses=3, patience_s=4.0)
    assert caught.value.exit_code == 1
    assert ("member", "w1 is a member (admitted); 1 of 3") in run.events


def test_waiting_ends_with_the_run() -> None:
    with pytest.raises(JoinTimeout, match="0 of 1 worker joined, and the run has finished"):
        Run(status(), status(finished=True)).wait()


def test_waiting_survives_a_restart_of_the_coordinator() -> None:
    away = CoordinatorUnreachable("no answer", remedy="look")
    run = Run(away, away, status((ANNA, "active", 1), let_in=(ANNA,)))
    assert [event for event, _ in run.wait()] == ["waiting", "away", "let_in", "member"]
    with pytest.raises(CoordinatorUnreachable):
        Run(away, away, away).wait(patience_s=2.0)


def test_events_for_programs_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_event_on_stderr("member", "w1 is a member", {"name": "w1"})
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["fields"]) == ("member", {"text": "w1 is a member", "name": "w1"})
