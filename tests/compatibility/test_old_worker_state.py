"""A volunteer's machine that has run commit 330f465: its keys, rules, counts and consents hold on.

anna, bert   trained in the run "whole" until everything was killed
gina         came twice, with two invitations; set rules; paused for a year; ended
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from oldformats.files import DATA, private_copy, recorded
from oldformats.library import (
    ACCEPTED,
    ARCHIVE,
    AgentLink,
    Bundle,
    BundleOffer,
    ConfigError,
    Contribution,
    DayBudget,
    Enrollment,
    FakeSensors,
    Identity,
    NotAccepted,
    PolicyEnforcer,
    RememberedInvitations,
    SavedSettings,
    ask_agent,
    folder_of_run,
    parse_invitation,
    pick_up_residual,
    read_checkpoint,
    require_consent,
)

KNOWN = recorded("coordinator/known.json")
AT_START = {"upload": "50Mbit", "temperature": "90"}
"""The rules that gina's command line had."""

RECORDED_AT = datetime(2026, 11, 23, 12, 0)
WITHIN_S = 20.0


@pytest.fixture
def gina(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Her folder of the run."""
    return home(tmp_path, monkeypatch, "gina")


def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    state = private_copy(DATA / "workers" / name, tmp_path / name)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    return state / "gridtrain" / "whole"


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def known_only_by(key: bytes) -> str:
    (name,) = (name for name, digits in KNOWN["keys"].items() if key.hex().startswith(digits))
    return str(name)


# -- keys and invitations --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["anna", "bert", "gina"])
def test_a_worker_is_the_same_peer_as_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home(tmp_path, monkeypatch, name)
    assert folder_of_run("whole") == folder
    coordinator = parse_invitation(KNOWN["invitations"]["crew"]).coordinator.hex()[:16]
    identity = Identity.read(folder / "identities" / coordinator / "worker-0.key")
    assert known_only_by(identity.public) == name


def test_a_key_that_others_may_read_is_refused_with_what_to_do(gina: Path) -> None:
    path = only(gina, "identities/*/worker-0.key")
    path.chmod(0o640)
    with pytest.raises(ConfigError) as refused:
        Identity.read(path)
    assert f"chmod 600 {path}" in refused.value.remedy


def test_an_invitation_that_was_not_needed_is_still_there(gina: Path) -> None:
    key = only(gina, "identities/*/worker-0.key")
    remembered = RememberedInvitations(key.parent)
    crew, kept = (parse_invitation(KNOWN["invitations"][name]) for name in ("crew", "kept"))
    assert remembered.was_admitted(key) and not remembered.was_admitted(key.with_name("worker-1.key"))
    assert remembered.unused(besides=crew) == [kept]
    assert remembered.unused(besides=kept) == []
    before = (key.parent / "invitations.json").read_bytes()
    remembered.record_attempt(key, crew)
    assert (key.parent / "invitations.json").read_bytes() == before, "she came in with it"


# -- rules and pause -------------------------------------------------------------------------------


def test_rules_that_were_set_hold_over_those_of_the_start(gina: Path) -> None:
    saved = SavedSettings(only(gina, "identities/*/worker-0"))
    later = {
        "battery": "pause",
        "upload": "5Mbit",
        "budget": "5GB",
        "temperature": "80/70",
        "hours": "06:00-23:00,23:00-06:00",
    }
    assert saved.effective_rules(AT_START) == later
    assert saved.effective_rules({"upload": "1Mbit", "gpu": "pause"}) == {
        **later,
        "upload": "1Mbit",
        "gpu": "pause",
    }
    assert saved.effective_rules({}) == later


def test_the_pause_holds_on(gina: Path) -> None:
    saved = SavedSettings(only(gina, "identities/*/worker-0"))
    until = json.loads(only(gina, "identities/*/worker-0/word.json").read_text())["until"]
    assert saved.is_paused and saved.until == datetime.fromisoformat(until)
    assert saved.until is not None and saved.until > RECORDED_AT


def test_the_agent_goes_on_with_rules_and_pause(gina: Path) -> None:
    said: list[str] = []
    with enforcer(gina, said) as running:
        shown = ask_agent(Path(running.path), {"ask": "show"})
        assert shown.keys() == KNOWN["shown"].keys()
        assert shown["rules"] == {**KNOWN["shown"]["rules"], "budget": "5GB"}  # then: 5000000000
        assert shown["readings"].keys() == KNOWN["shown"]["readings"].keys()
        assert (shown["state"], shown["run"], shown["key"]) == ("paused", "whole", KNOWN["keys"]["gina"])
        resumed = ask_agent(Path(running.path), {"ask": "resume"})
        assert resumed["state"] != "paused"
    assert any("paused" in line for line in said)
    assert not SavedSettings(only(gina, "identities/*/worker-0")).is_paused


def enforcer(folder: Path, said: list[str]) -> PolicyEnforcer:
    sensors = FakeSensors(on_battery=False, gpu_used=False, idle_s=1e4, temperature_C=40.0)
    return PolicyEnforcer(
        only(folder, "identities/*/worker-0"),
        "gina",
        AT_START,
        said.append,
        run="whole",
        key=KNOWN["keys"]["gina"],
        sensors=sensors,
        now=lambda: RECORDED_AT,
    )


def test_an_agent_tells_its_script_what_it_told_an_old_one(gina: Path) -> None:
    with enforcer(gina, []) as running, socket.socket(socket.AF_UNIX) as line:
        line.settimeout(WITHIN_S)
        line.connect(running.path)
        line.sendall(b'{"role": "script", "pid": 1}\n')
        wish = json.loads(line.makefile().readline())
        assert {name: type(value) for name, value in wish.items()} == {
            **{name: type(value) for name, value in KNOWN["wish"].items()},
        }
        assert (wish["run"], wish["upload_Bps"]) == (False, KNOWN["wish"]["upload_Bps"])


def test_an_agent_understands_an_old_script(gina: Path) -> None:
    """Its lines as they were: it trains, under the name that the run gave it, and has moved some bytes."""
    with enforcer(gina, []) as running, socket.socket(socket.AF_UNIX) as line:
        before = ask_agent(Path(running.path), {"ask": "resume"})
        line.settimeout(WITHIN_S)
        line.connect(running.path)
        line.sendall(b'{"role": "script", "pid": 1}\n')
        line.sendall(b'{"state": "training", "step": 12, "name": "gina-2", "moved_bytes": 4711}\n')
        until_s = time.monotonic() + WITHIN_S
        while (shown := ask_agent(Path(running.path), {"ask": "show"}))["state"] == before["state"]:
            assert time.monotonic() < until_s
        assert (shown["name"], shown["state"], shown["obeyed"]) == ("gina-2", "training", True)
        assert shown["moved_today_bytes"] == before["moved_today_bytes"] + 4711


@pytest.fixture
def old_agent(tmp_path: Path) -> Iterator[str]:
    """A socket that says to whoever comes what an old agent said."""
    path, ended = str(tmp_path / "control.sock"), threading.Event()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            talk, _ = listening.accept()
            with talk:
                talk.sendall(
                    json.dumps({**KNOWN["wish"], "run": False, "reason": "battery"}).encode() + b"\n"
                )
                ended.wait(WITHIN_S)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield path
        ended.set()
        thread.join(WITHIN_S)


def test_a_script_understands_an_old_agent(old_agent: str) -> None:
    wish, known = AgentLink(old_agent, lambda: 0).directive, KNOWN["wish"]
    assert (wish.run, wish.reason, wish.stop, wish.most_bytes) == (
        False,
        "battery",
        False,
        known["most_bytes"],
    )
    assert (wish.upload_Bps, wish.download_Bps, wish.spent_text) == (625_000.0, None, known["spent_text"])


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["anna", "bert", "gina"])
def test_bytes_of_the_day_are_counted_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = only(home(tmp_path, monkeypatch, name), "identities/*/worker-0")
    written = json.loads((folder / "budget.json").read_text())
    day, budget = date.fromisoformat(written["day"]), DayBudget(folder)
    assert budget.today_bytes(day) == written["bytes"] > 0
    budget.add(5, day)
    budget.keep()
    assert DayBudget(folder).today_bytes(day) == written["bytes"] + 5


@pytest.mark.parametrize(("name", "file"), [("anna", "now"), ("bert", "now"), ("gina", "given")])
def test_what_was_contributed_is_known(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = only(home(tmp_path, monkeypatch, name), f"identities/*/worker-0.{file}.json")
    written = json.loads(path.read_text())
    found = Contribution.read(path)
    assert found is not None and {name: getattr(found, name) for name in written} == written
    found.write(path)
    assert json.loads(path.read_text()) == written


# -- consent ---------------------------------------------------------------------------------------


def offer_of(folder: Path, archive: bytes, digest: str) -> BundleOffer:
    crew = parse_invitation(KNOWN["invitations"]["crew"])
    identity = only(folder, "identities/*/worker-0.key")
    entry = Enrollment(crew.address, crew.coordinator, crew.run, crew.encrypted, identity, {})
    place = folder / "bundles" / crew.coordinator.hex()[:16] / digest.removeprefix("sha256:")[:32] / "files"
    return BundleOffer(Bundle.from_archive(archive, digest), entry, place, "", None)


def test_a_bundle_that_was_accepted_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home(tmp_path, monkeypatch, "anna")
    (digest,) = json.loads(only(folder, f"bundles/*/{ACCEPTED}").read_text())
    offer = offer_of(folder, only(folder, f"bundles/*/*/{ARCHIVE}").read_bytes(), digest)
    assert offer.folder.is_dir(), "it is looked for where it lies"
    require_consent(offer, "", None)
    assert offer.bundle.files["train.py"] == (DATA / "scripts" / "train.py").read_bytes()
    assert {name: (offer.folder / name).read_bytes() for name in offer.bundle.files} == offer.bundle.files


def test_another_bundle_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home(tmp_path, monkeypatch, "anna")
    digest, _ = recorded("texts/files.json")["bundle"]
    offer = offer_of(folder, (DATA / "texts" / "bundle.tar").read_bytes(), digest)
    with pytest.raises(NotAccepted) as refused:
        require_consent(offer, "", None)
    assert digest in refused.value.remedy


# -- what was not sent -----------------------------------------------------------------------------


def checkpoint_of(folder: Path) -> Any:
    return read_checkpoint(sorted(folder.glob("checkpoints/*/worker-0/step-*"))[-1])


def test_what_a_worker_had_not_sent_when_it_left_is_read_back_once(gina: Path) -> None:
    facts = checkpoint_of(gina).facts
    folder = only(gina, "checkpoints/*/worker-0")
    note = json.loads((folder / "left" / "note.json").read_text())
    left = pick_up_residual(folder, facts, 37)
    assert left is not None
    assert (left.applied, left.history.hex()) == (note["applied"], note["history"])
    assert left.residual_N.shape == (37,) and 0 < abs(left.residual_N).sum() < 100
    assert not (folder / "left").exists() and pick_up_residual(folder, facts, 37) is None


def test_a_residual_of_another_training_is_not_read_back(gina: Path) -> None:
    (*facts, _) = checkpoint_of(gina).facts
    assert pick_up_residual(only(gina, "checkpoints/*/worker-0"), tuple(facts), 37) is None
