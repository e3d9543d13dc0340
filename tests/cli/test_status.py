"""The table that `gridtrain status` prints."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gridtrain_coordinator
from gridtrain.cli import status as module
from gridtrain.event_text import SENTENCES, event_text

STATUS: dict[str, Any] = {
    "run": "default", "phase": "training", "reason": "2 workers since step 40", "term": 1, "generation": 3,
    "step": 41, "steps_per_s": 12.345, "finished": False, "now_s": 100.0,
    "facts": {"exchange": "GTopK(density=0.05)"},
    "members": [
        {"rank": 0, "name": "anna", "state": "active", "share": 8, "step": 41, "last_heard_s": 0.2,
         "sent_Bps": 2_450_000.0, "received_Bps": 950.0, "reach": "direct", "strikes": 0,
         "figures": {"computing_s": 0.021, "selecting_s": 0.001, "communicating_s": 1.25, "waiting_s": 0.0}},
        {"rank": None, "name": "[red]bert", "state": "joining", "share": 0, "step": 0, "last_heard_s": 0.0,
         "sent_Bps": None, "received_Bps": None, "figures": {}, "reach": "behind NAT", "strikes": 0},
    ],
    "events": [{"at_s": 88.0, "event": "joined", "name": "anna"}],
}  # fmt: skip

DRAWN = """\
run default  training  2 workers since step 40
term 1  generation 3  step 41  12.35 steps/s
exchange: GTopK(density=0.05)
rank name      state   reach      share step    up/s down/s comp. select comm. wait heard
   0 anna      active  direct         8   41 2.45 MB  950 B 21 ms   1 ms 1.2 s 0 ms   0 s
   - [red]bert joining behind NAT     0    0       -      -     -      -     -    -   0 s
   12 s ago  anna has joined
"""

WITH_VIOLATIONS = """\
rank name      state   reach      violations share step    up/s down/s comp. select comm. wait heard
   0 anna      active  direct              0     8   41 2.45 MB  950 B 21 ms   1 ms 1.2 s 0 ms   0 s
   - [red]bert joining behind NAT          2     0    0       -      -     -      -     -    -   0 s
"""


def drawn(status: dict[str, Any], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(module.render(status))
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def test_the_table_is_as_expected() -> None:
    assert drawn(STATUS) == DRAWN
    assert drawn({**STATUS, "members": STATUS["members"][::-1]}) == DRAWN, "ordered by rank"


def test_the_mean_of_the_reported_losses_is_shown() -> None:
    assert "step 41  12.35 steps/s  loss 3.5\n" in drawn({**STATUS, "loss": 3.5})


@pytest.mark.parametrize(
    ("length", "line"),
    [
        ({"total_steps": 3000}, "step 41 of 3000  12.35 steps/s, 4 min left"),
        (
            {"total_steps": None, "samples": 656, "total_samples": 3000, "epochs": 5},
            "step 41 in pass 2 of 5 (21 %)  12.35 steps/s, 4 min left",
        ),
        ({"samples": 3000, "total_samples": 3000, "epochs": 5}, "step 41 in pass 5 of 5 (100 %)  12.35"),
    ],
)
def test_the_length_of_the_run_and_the_remaining_time_are_shown(length: dict[str, Any], line: str) -> None:
    assert line in drawn({**STATUS, **length, "remaining_s": 239.6})


def test_a_smaller_share_of_the_entries_is_shown_with_its_reason() -> None:
    reason = "fewer entries for slow uploads (usual upload 100 Mbit/s): bert 10% of k (upload 5 Mbit/s)"
    line = "exchange: GTopK(density=0.05)\n"
    assert drawn({**STATUS, "entry_shares_reason": reason}) == DRAWN.replace(line, f"{line}{reason}\n")
    assert drawn({**STATUS, "entry_shares_reason": ""}) == DRAWN


def test_the_bytes_of_joins_and_the_bases_are_shown() -> None:
    anna, bert = STATUS["members"]
    figures, about = {"state_bytes": 246_000.0}, {"base": "3.5 GB in 291 frozen tensors, digest 0123456789ab"}
    status = {**STATUS, "members": [{**anna, "about": about}, {**bert, "figures": figures}]}
    line = "exchange: GTopK(density=0.05)\n"
    joined = "state received to join: [red]bert 246 kB\n"
    assert drawn(status) == DRAWN.replace(line, line + joined), "all have the same base"
    facts = {"exchange": "GTopK(density=0.05)", "base": "any"}
    bases = f"base: any\nbase of anna: {about['base']}\n"
    assert drawn({**status, "facts": facts}) == DRAWN.replace(line, line + bases + joined)
    about["base_origin"] = "llama@0123"
    assert drawn(status) == DRAWN.replace(line, line + "base loaded from llama@0123\n" + joined)
    bases = bases.replace("ab\n", "ab, from llama@0123\n")
    assert drawn({**status, "facts": facts}) == DRAWN.replace(line, line + bases + joined)


def test_violations_are_shown_if_there_are_any() -> None:
    anna, bert = STATUS["members"]
    assert WITH_VIOLATIONS in drawn({**STATUS, "members": [anna, {**bert, "strikes": 2}]})


def test_reported_problems_are_shown_below_the_table() -> None:
    anna, bert = STATUS["members"]
    seen = drawn({**STATUS, "members": [anna, {**bert, "reason": "could not write 3 checkpoints in a row"}]})
    assert seen.splitlines()[-2] == "[red]bert could not write 3 checkpoints in a row"


def test_refused_versions_are_shown_with_the_remedy() -> None:
    versions = [{"version": 5, "software": "gridtrain [red]0.0", "workers": count} for count in (2, "x")]
    (line,) = (
        line for line in drawn({**STATUS, "refused_versions": versions}, 140).splitlines() if "->" in line
    )
    assert line == (
        "refused in the last 24 hours: 2 workers with gridtrain [red]0.0 (protocol version 5) "
        "-> install the coordinator's version of gridtrain there"
    )


def test_the_slow_member_is_named_with_the_reason() -> None:
    slow = {"peer": "b" * 64, "name": "[red]bert", "reason": "is busy for 3 s per step; the median is 1 s"}
    said = "the others wait for [red]bert, which is busy for 3 s per step; the median is 1 s\n"
    assert said in drawn({**STATUS, "waited_for": slow}) and "wait for" not in drawn(STATUS)


def test_events_are_sentences() -> None:
    reason = "`gridtrain worker`, which ran its script, has ended unexpectedly"
    assert event_text({"at_s": 3.0, "event": "lost", "name": "an{0}", "reason": reason}) == (
        f"an{{0}} is lost: {reason}"
    )
    assert event_text({"event": "called_back", "name": "bert", "reachable": False}) == (
        "other workers cannot connect to bert"
    )
    assert event_text({"event": "training", "workers": 1}) == "training continues with 1 worker from step ?"
    assert event_text({"event": "training", "workers": 2, "step": 0}) == "training starts with 2 workers"
    assert event_text(
        {"event": "step_skipped", "name": "bert", "skipped": 1, "step": 7, "reason": "why"}
    ) == ("bert had unusable gradients in 1 step, the latest near step 7: why")
    assert event_text({"event": "removed", "name": "bert", "reason": "was removed from the run: slow"}) == (
        "bert was removed from the run: slow"
    )
    assert event_text({"event": "a_later_one", "name": "bert"}) == "a later one name=bert"


def test_each_event_of_the_run_has_a_sentence() -> None:
    folder = Path(gridtrain_coordinator.__file__).parent
    sources = "".join(path.read_text() for path in folder.rglob("*.py"))
    events = set(re.findall(r'(?:LogEvent|self\._log)\(\s*"\w+",\s*"(\w+)"', sources))
    assert len(events) > 35 and events <= SENTENCES.keys()


def test_a_paused_worker_is_shown_with_the_length_and_the_reason_of_its_pause() -> None:
    reasons = "paused by its owner: battery, until 22:00", "paused"
    resting = [{"name": "anna", "reason": reason, "since_s": 5.0} for reason in reasons]
    assert module.paused_lines({"resting": resting}) == [
        "anna was paused by its owner 5 s ago: battery, until 22:00",
        "anna was paused 5 s ago",
    ]


def test_the_table_has_a_limited_width_in_a_pipe() -> None:
    """With large figures and a long name only the name is truncated, and no line is wrapped."""
    widest = {
        "rank": 999, "name": "n" * 64, "state": "admitted", "reach": "behind NAT",
        "strikes": 2, "share": 99_999, "step": 9_999_999, "last_heard_s": 4.999,
        "sent_Bps": 1.235e6, "received_Bps": 1.235e6, "figures": dict.fromkeys(module.SECONDS, 999.9),
    }  # fmt: skip
    lines = drawn({"members": [widest]}).splitlines()
    assert max(map(len, lines)) <= module.PLAIN_WIDTH and len(lines) == 4
    assert "n\u2026 admitted behind NAT          2 99999 9999999 1.24 MB 1.24 MB 999.9 s" in lines[3]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_names_are_complete_on_a_narrow_terminal(width: int) -> None:
    """Commands need names, so columns of times are omitted, and headings stay above their figures."""
    anna, bert = STATUS["members"]
    lines = drawn({**STATUS, "members": [{**anna, "name": "brisk-lynx-d369"}, bert]}, width).splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if "brisk-lynx-d369" in line)
    head = lines[lines.index(row) - 1]
    assert "share" in head and ("select" in head) == (width == 100) and "\u2026" not in head + row
    assert row.index("8 ") == head.index("share") + len("share") - 1


def test_a_run_that_learns_nothing_says_so_in_its_headline() -> None:
    alert = "nothing is being learned: the last 41 steps were skipped"
    seen = drawn({**STATUS, "alert": alert, "skipped_samples": 1312})
    assert seen == DRAWN.replace("training  ", f"training  {alert}; ").replace(
        "step 41 ", "step 41 (1312 samples skipped) "
    )


def test_a_run_without_workers_says_so() -> None:
    assert "no worker has joined yet" in drawn({**STATUS, "members": [], "generation": 0})
    assert "no worker is connected" in drawn({**STATUS, "members": []})
    assert "all workers have left" in drawn({**STATUS, "members": [], "finished": True})


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"members": 3, "events": "no", "facts": [], "step": None},
        {
            "members": [None, {}, {"rank": "x", "figures": 1, "step": [], "reach": 3, "strikes": "many"}],
            "events": [1, {"at_s": "x"}],
            "phase": {},
        },
    ],
    ids=["empty", "wrong types", "wrong members"],
)
def test_any_status_can_be_drawn(status: dict[str, Any]) -> None:
    assert "run" in drawn(status)


def test_watching_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    statuses = [STATUS, STATUS, {**STATUS, "phase": "finished", "finished": True}, STATUS]
    module._watch(lambda timeout_s: statuses.pop(0))
    assert statuses == [STATUS]


def test_stages_and_reasons_of_standbys_are_shown() -> None:
    members = [
        {"rank": 0, "name": "anna", "state": "active", "stage": 0, "spare": ""},
        {"rank": 1, "name": "bert", "state": "active", "stage": 1, "spare": ""},
        {
            "rank": None,
            "name": "carl",
            "state": "spare",
            "stage": None,
            "spare": "spare: 2 stages x 1 are 2 workers",
        },
    ]
    lines = drawn({"run": "r", "phase": "training", "stages": 2, "members": members}).splitlines()
    assert any(line.split()[:3] == ["rank", "stage", "name"] for line in lines)
    assert any(line.split()[:4] == ["1", "1", "bert", "active"] for line in lines)
    assert any(line.split()[:4] == ["-", "-", "carl", "standby"] for line in lines)
    assert "spare: 2 stages x 1 are 2 workers" in "\n".join(lines)
    assert "stage" not in drawn({"run": "r", "phase": "training", "stages": 1, "members": members[:1]})
