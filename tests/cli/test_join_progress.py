"""`gridtrain invite --until-joined`: what its owner sees.

0 s  nobody          waiting
1 s  let in          key 010101010101 was admitted
2 s  joining         (it is measured)
3 s  active, rank 0  anna is a member (rank 0); 1 of 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gridtrain.cli.join_progress import JoinTimeout, await_members, print_event_on_stderr
from gridtrain.core.group.invitation import Invitation, invitation_digest
from gridtrain.errors import CoordinatorUnreachable
from gridtrain.network.transport.identity import Identity

INVITATION = Invitation("tcp://127.0.0.1:1", bytes(32), b"t" * 32, "default")
ID = invitation_digest(Identity.from_secret(INVITATION.token).public)[:8]
ANNA, BO = "01" * 32, "02" * 32


def picture(
    *members: tuple[str, str, int | None], let_in: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """Of a run whose door has let these keys in with the invitation, and "ff" with another one."""
    lines = [{"peer": peer, "invitation": ID} for peer in let_in]
    others = [{"peer": "ff" * 32, "invitation": "another!"}]
    rows = [{"peer": p, "name": f"w{p[1]}", "state": state, "rank": rank} for p, state, rank in members]
    rows.append({"peer": "ff" * 32, "name": "wf", "state": "active", "rank": 7})
    return {"door": {"enrolled": lines + others}, "members": rows, **more}


class Run:
    """Each question is answered by the next picture; a second passes between two."""

    def __init__(self, *pictures: dict[str, Any] | Exception) -> None:
        self.pictures: Iterator[dict[str, Any] | Exception] = iter(pictures)
        self.now_s = 0.0
        self.said: list[tuple[str, str]] = []

    def ask(self, timeout_s: float) -> dict[str, Any]:
        answer = next(self.pictures)
        self.now_s += 1.0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def waits(self, uses: int = 1, patience_s: float = 10.0) -> list[tuple[str, str]]:
        await_members(
            self.ask, INVITATION, uses, patience_s,
            clock=lambda: self.now_s, pause=lambda length_s: None,
            say=lambda event, text, fields: self.said.append((event, text)),
        )  # fmt: skip
        return self.said


def test_a_worker_that_comes_in() -> None:
    run = Run(
        picture(),
        picture(let_in=(ANNA,)),
        picture((ANNA, "joining", None), let_in=(ANNA,)),
        picture((ANNA, "active", 0), let_in=(ANNA,)),
    )
    assert run.waits() == [
        ("waiting", "waiting 10 s for workers to join (Ctrl-C stops waiting)"),
        ("let_in", "key 010101010101 was admitted; its script is starting"),
        ("member", "w1 is a member (rank 0); 1 of 1"),
    ]


def test_not_in_time() -> None:
    run = Run(*[picture((ANNA, "admitted", None), let_in=(ANNA, BO))] * 5)
    with pytest.raises(
        JoinTimeout, match=r"^1 of 3 workers joined, 1 more were admitted after 4 s -> "
    ) as caught:
        run.waits(uses=3, patience_s=4.0)
    assert caught.value.exit_code == 1
    assert ("member", "w1 is a member (admitted); 1 of 3") in run.said


def test_a_run_that_ends_meanwhile() -> None:
    with pytest.raises(JoinTimeout, match="0 of 1 worker joined, and the run is finished"):
        Run(picture(), picture(finished=True)).waits()


def test_a_coordinator_that_is_restarted() -> None:
    away = CoordinatorUnreachable("no answer", remedy="look")
    run = Run(away, away, picture((ANNA, "active", 1), let_in=(ANNA,)))
    assert [event for event, _ in run.waits()] == ["waiting", "away", "let_in", "member"]
    with pytest.raises(CoordinatorUnreachable):
        Run(away, away, away).waits(patience_s=2.0)


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    print_event_on_stderr("member", "w1 is a member", {"name": "w1"})
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["fields"]) == ("member", {"text": "w1 is a member", "name": "w1"})
