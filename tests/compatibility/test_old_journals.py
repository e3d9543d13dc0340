"""Later code reads the folder of a coordinator of commit 330f465 as that commit did.

interrupted   two terms, invitations of all kinds, a kick, a ban, an unban, three violations; killed
finished      the same run, later: a third term, and the end
stages        a model in two stages: reported checkpoints, a rollback; killed
judgements    violations reported by members, a false accuser that was found, a member that was readmitted
invented      entries of a run with every field in use, which real runs leave at their defaults
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oldformats.files import DATA, private_copy, recorded
from oldformats.library import (
    CheckpointInfo,
    ConfigError,
    Deadlines,
    EndpointFile,
    Identity,
    Join,
    JournalEntry,
    JournalError,
    JournalStore,
    Membership,
    MessageReceived,
    SupersededEntries,
    access_of_journal,
    compacted_entry,
    dashboard_token,
    is_same_run,
    operator_identity,
    parse_invitation,
    read_checkpoint_head,
    recover_run,
    restore_backup,
)
from oldformats.positions import plain

NAMES = ("interrupted", "finished", "stages", "judgements", "invented")
READ = recorded("coordinator/read_by_the_old_code.json")
KNOWN = recorded("coordinator/known.json")


def state_of(name: str, tmp_path: Path) -> Path:
    return private_copy(DATA / "coordinator" / name, tmp_path / name)


def rows_of(journal: Path) -> list[tuple[int, str, Any]]:
    """The rows of the file, read without the library."""
    connection = sqlite3.connect(journal)
    rows = connection.execute("SELECT id, kind, body FROM journal ORDER BY id").fetchall()
    connection.close()
    return [(row_id, kind, json.loads(body)) for row_id, kind, body in rows]


def entries_of(state: Path) -> list[tuple[str, Any]]:
    store = JournalStore.open(state / "journal.sqlite")
    try:
        return entries_in(store)
    finally:
        store.close()


def entries_in(store: JournalStore) -> list[tuple[str, Any]]:
    return [(entry.kind, entry.body) for entry in store.entries()]


def key_of(name: str) -> str:
    """The key of a worker of the run "whole", in hexadecimal."""
    enrolled = [body["peer"] for kind, body in _bodies() if kind == "enrolled"]
    (key,) = {peer for peer in enrolled if peer.startswith(KNOWN["keys"][name])}
    return str(key)


def _bodies() -> list[tuple[str, Any]]:
    journal = DATA / "coordinator" / "interrupted" / "journal.db"
    connection = sqlite3.connect(f"file:{journal}?mode=ro&immutable=1", uri=True)
    rows = connection.execute("SELECT kind, body FROM journal ORDER BY id").fetchall()
    connection.close()
    return [(kind, json.loads(body)) for kind, body in rows]


# -- what all journals have ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_read_and_its_chain_holds(name: str, tmp_path: Path) -> None:
    state = state_of(name, tmp_path)
    expected = rows_of(state / "journal.sqlite")
    store = JournalStore.open(state / "journal.sqlite")
    assert [(entry.id, entry.kind, entry.body) for entry in store.entries()] == expected
    assert store.identity() == Identity.read(state / "coordinator.key")
    assert plain(store.key()) == READ[name]["key"]
    assert store.next_term() == READ[name]["next term"]
    store.close()
    assert len(rows_of(state / "journal.sqlite")) == len(expected) + 1


@pytest.mark.parametrize("name", NAMES)
def test_the_run_is_recovered_as_it_was(name: str, tmp_path: Path) -> None:
    run = recover_run(entries_of(state_of(name, tmp_path)))
    found = (
        run.definition,
        run.generation,
        run.view,
        run.roster,
        run.has_started,
        run.is_finished,
        run.highest_step,
    )
    assert plain((*found, run.checkpoints)) == READ[name]["recovered"]


@pytest.mark.parametrize("name", NAMES)
def test_a_compacted_journal_has_the_same_run_and_admits_the_same_keys(name: str, tmp_path: Path) -> None:
    state = state_of(name, tmp_path)
    store, superseded = JournalStore.open(state / "journal.sqlite"), SupersededEntries()
    for entry in store.entries():
        superseded.add(entry.id, entry.kind, entry.body)
    run, length = recover_run(entries_in(store)), len(entries_in(store))
    with store.compaction(superseded.ids, compacted_entry(run)):
        pass
    store.close()
    store = JournalStore.open(state / "journal.sqlite")
    assert is_same_run(recover_run(entries_in(store)), run)
    assert len(entries_in(store)) == 1 + length - len(superseded.ids)
    operator = operator_identity(state / "journal.sqlite").public
    access = access_of_journal(store, name, operator, store.identity().public)
    assert access.status(READ[name]["wall_s"]) == READ[name]["door"]
    store.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_run_is_recovered_wherever_the_coordinator_was_killed(name: str, tmp_path: Path) -> None:
    entries = entries_of(state_of(name, tmp_path))
    generations = 0
    for end, (kind, body) in enumerate(entries, start=1):
        generations = body["generation"] if kind == "generation" else generations
        assert recover_run(entries[:end]).generation == generations


@pytest.mark.parametrize("name", NAMES)
def test_the_same_keys_are_admitted(name: str, tmp_path: Path) -> None:
    state = state_of(name, tmp_path)
    store = JournalStore.open(state / "journal.sqlite")
    operator = operator_identity(state / "journal.sqlite").public
    access = access_of_journal(store, name, operator, store.identity().public)
    store.close()
    wall_s, standings = READ[name]["wall_s"], READ[name]["standings"]
    assert access.status(wall_s) == READ[name]["door"]
    assert {peer: access.access_role(bytes.fromhex(peer), wall_s).value for peer in standings} == standings
    assert plain(operator) == READ[name]["operator"]
    assert access.is_operator(operator) and access.access_role(operator, wall_s).value == "peer"


@pytest.mark.parametrize("name", NAMES)
def test_a_new_journal_has_the_tables_of_an_old_one(name: str, tmp_path: Path) -> None:
    """Once it was opened, which migrates it."""
    query = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
    schemas = []
    for path in (tmp_path / "new.sqlite", state_of(name, tmp_path) / "journal.sqlite"):
        JournalStore.open(path).close()
        connection = sqlite3.connect(path)
        versions = [
            connection.execute(f"PRAGMA {what}").fetchone() for what in ("user_version", "application_id")
        ]
        schemas.append((versions, connection.execute(query).fetchall()))
        connection.close()
    assert schemas[0] == schemas[1]


# -- what happened in these runs --------------------------------------------------------------------


def test_the_interrupted_run_waits_for_its_two_members(tmp_path: Path) -> None:
    entries = entries_of(state_of("interrupted", tmp_path))
    run = recover_run(entries)
    assert run.has_started and not run.is_finished and run.view is not None and run.definition is not None
    assert {member.peer.hex(): member.name for member in run.roster} == {
        key_of("anna"): "anna",
        key_of("bert"): "bert",
    }
    assert (run.view.term, run.view.world_size, run.view.exchange) == (2, 2, "")
    assert dict(run.definition.facts)["exchange"] == "GTopK(density=0.25, momentum=0.875, values=fp16)"
    assert (run.definition.ledger.size, run.definition.ledger.seed, run.definition.ledger.steps) == (
        48,
        5,
        700,
    )
    assert run.view.ledger.step == run.view.applied + 1 > 200
    assert [member.share for member in run.roster] == [6, 6]


def test_facts_that_its_version_did_not_record_are_those_of_the_first_worker_that_returns(
    tmp_path: Path,
) -> None:
    run = recover_run(entries_of(state_of("interrupted", tmp_path)))
    assert run.definition is not None and run.view is not None
    coordinator = Membership(
        me=bytes(32), run="whole", term=9, deadlines=Deadlines(), software="", recovered=run
    )
    facts = (*run.definition.facts, ("base", "1 MB, digest 01"), ("adapter", "default r=8"))
    checkpoint = CheckpointInfo(run.view.applied, run.view.history, run.view.ledger)
    setup = replace(run.definition, facts=facts, batch_size=6, checkpoint=checkpoint)
    anna = bytes.fromhex(key_of("anna"))
    coordinator.handle(MessageReceived(anna, Join("whole", "anna", "")), 1.0)
    effects = coordinator.handle(MessageReceived(anna, setup), 1.0)
    assert [e.body["facts"] for e in effects if isinstance(e, JournalEntry)] == [dict(facts)]


def test_a_removed_worker_stays_removed(tmp_path: Path) -> None:
    state = state_of("interrupted", tmp_path)
    store = JournalStore.open(state / "journal.sqlite")
    access = access_of_journal(
        store, "whole", operator_identity(state / "journal.sqlite").public, store.identity().public
    )
    store.close()
    wall_s = READ["interrupted"]["wall_s"]
    standings = {
        name: access.access_role(bytes.fromhex(key_of(name)), wall_s).value for name in KNOWN["keys"]
    }
    assert standings == {
        **dict.fromkeys(("anna", "bert", "gina"), "peer"),
        **dict.fromkeys(("clara", "dora", "erik"), "stranger"),
    }
    replies = {}
    crew = Identity.from_secret(parse_invitation(KNOWN["invitations"]["crew"]).token).public
    for name in ("clara", "dora", "erik"):
        replies[name] = access.enrol(crew, bytes.fromhex(key_of(name)), "127.0.0.1", wall_s).reply
    assert [getattr(reply, "code", "") for reply in replies.values()] == ["kicked", "banned", "kicked"]
    assert (
        "too slow" in str(replies["clara"])
        and "spam" in str(replies["dora"])
        and "3 strikes" in str(replies["erik"])
    )
    assert (
        KNOWN["struck out"] == key_of("erik") and access.violation_count(bytes.fromhex(key_of("erik"))) == 3
    )
    pardoned = bytes.fromhex(KNOWN["pardoned"])
    assert access.access_role(pardoned, wall_s).value == "stranger"
    assert KNOWN["pardoned"] not in str(access.status(wall_s)["banned"])


def test_invitations_are_as_valid_as_before(tmp_path: Path) -> None:
    state = state_of("interrupted", tmp_path)
    store = JournalStore.open(state / "journal.sqlite")
    access = access_of_journal(
        store, "whole", operator_identity(state / "journal.sqlite").public, store.identity().public
    )
    store.close()
    wall_s = READ["interrupted"]["wall_s"]
    pending = {
        name: Identity.from_secret(parse_invitation(text).token).public
        for name, text in KNOWN["invitations"].items()
    }
    refusals = {name: access.invitation_refusal(key, wall_s) for name, key in pending.items()}
    assert {name: refusal and refusal.reason for name, refusal in refusals.items()} == {
        "crew": None,
        "expired": "this invitation has expired",
        "withdrawn": "this invitation was withdrawn by the run's owner",
        "open": None,
        "used up": "this invitation has no uses left",
        "kept": None,
    }
    assert {access.access_role(key, wall_s + 400 * 86_400).value for key in pending.values()} == {"stranger"}


def test_the_finished_run_is_finished(tmp_path: Path) -> None:
    run = recover_run(entries_of(state_of("finished", tmp_path)))
    assert run.is_finished and run.view is not None and run.view.term == 3


def test_recorded_checkpoints_of_stages_are_those_on_the_disks(tmp_path: Path) -> None:
    run = recover_run(entries_of(state_of("stages", tmp_path)))
    assert run.definition is not None and run.definition.stages == 2 and run.view is not None
    assert run.definition.model is not None and run.definition.model.cuts == (0, 2, 4)
    assert len(run.view.stage_bounds) == 3 and run.view.stage_bounds[-1] == 4, (
        "it may have been repartitioned"
    )
    replies = {
        (applied, history.hex(), (blocks.start, blocks.stop)): {digest.hex() for digest in digests}
        for (applied, history, _), stages in run.checkpoints.items()
        for blocks, digests in stages.items()
    }
    found: dict[tuple[int, str, tuple[int, int]], set[str]] = {}
    for path in (DATA / "workers").glob("*/gridtrain/stages/checkpoints/*/*/blocks-*/step-*"):
        info, _ = read_checkpoint_head(path)
        _, start, stop = path.parent.name.split("-")
        key = info.applied, info.history.hex(), (int(start), int(stop))
        found.setdefault(key, set()).add(info.digest.hex())
    assert replies == found and sorted({applied for applied, *_ in replies}) == [19, 39]


def test_every_field_of_a_generation_is_recovered(tmp_path: Path) -> None:
    run = recover_run(entries_of(state_of("invented", tmp_path)))
    assert run.view is not None and run.definition is not None and run.definition.model is not None
    assert run.view.verdict.name == "COMMIT" and plain(run.view.decided_round) == [2, 6, 40, 3]
    assert plain(run.view.ledger.requeued) == [[100, 106], [112, 118]] and run.view.ledger.skipped == 6
    assert run.view.exchange == "GTopK(density=0.01)" and run.view.stage_bounds == (0, 2, 3)
    assert run.definition.global_batch_size == 12 and run.definition.ledger.epochs == 3
    assert plain(run.definition.model) == [
        [0, 1, 3],
        [[100 * n, *range(100 * n + 1, 100 * n + 6), 0.25 * n, 0.5 * n, 0.125] for n in (1, 2, 3)],
        *(4, 2, 3.5, 24, False, True, 0.5, True),
    ]
    anna, bert = run.roster
    assert plain(anna) == [
        {"hex": b"anna".ljust(32, b".").hex()},
        "anna",
        "tcp://192.0.2.1:7",
        6,
        False,
        -1,
        [],
        {"hex": ""},
        [],
    ]
    assert (bert.name, bert.address, bert.share, bert.joining) == ("b\u00e4rt", "", 5, True)
    assert plain(bert)[5:7] == [0, [[[0, 1], 0], [[1, 3], 1]]]
    assert [digest.hex() for digest in bert.piece_digests] == ["", bytes(range(32, 64)).hex()]
    (checkpoint,) = run.checkpoints
    assert checkpoint[0] == 19, "the one of step 40 is later than the step to which the run went back"


def test_a_member_that_was_falsely_accused_is_a_member(tmp_path: Path) -> None:
    kinds = [(kind, body.get("cause", "")) for kind, body in entries_of(state_of("judgements", tmp_path))]
    assert ("expelled", "liar") in kinds and ("expelled", "strikes") in kinds
    standings = {bytes.fromhex(peer).rstrip(b"."): s for peer, s in READ["judgements"]["standings"].items()}
    assert [name for name, standing in standings.items() if standing == "peer"] == [b"bert", b"carl", b"dora"]


# -- other files of the folder, and refusals --------------------------------------------------------


def test_a_backup_is_restored(tmp_path: Path) -> None:
    backups = private_copy(DATA / "coordinator" / "backups", tmp_path / "backups")
    source = restore_backup(backups, tmp_path / "state")
    entries = entries_of(tmp_path / "state")
    later = [(kind, body) for _, kind, body in rows_of(state_of("interrupted", tmp_path) / "journal.sqlite")]
    assert entries == later[: len(entries)]
    assert source.name == f"backup-2-{len(entries):08d}"
    for name in ("coordinator.key", "operator.key"):
        assert Identity.read(tmp_path / "state" / name) == Identity.read(source / name)
    store = JournalStore.open(tmp_path / "state" / "journal.sqlite")
    assert plain(store.identity().public) == READ["interrupted"]["key"]
    store.close()


def test_programs_find_the_coordinator_by_its_contact_file(tmp_path: Path) -> None:
    state = state_of("interrupted", tmp_path)
    crew = parse_invitation(KNOWN["invitations"]["crew"])
    assert plain(EndpointFile.read(state)) == [
        crew.address,
        crew.address,
        {"hex": Identity.read(state / "coordinator.key").public.hex()},
        "whole",
        True,
        0,  # the process, which its version did not record
    ]


def test_the_token_of_the_dashboard_does_not_change(tmp_path: Path) -> None:
    state = state_of("interrupted", tmp_path)
    assert dashboard_token(state) == (state / "dashboard.token").read_text().strip()


def test_an_altered_entry_is_refused_with_what_to_do(tmp_path: Path) -> None:
    journal = state_of("interrupted", tmp_path) / "journal.sqlite"
    content = journal.read_bytes()
    assert content.count(b'"too slow"') == 1
    journal.write_bytes(content.replace(b'"too slow"', b'"too fast"'))
    with pytest.raises(JournalError) as refused:
        JournalStore.open(journal)
    assert "--from-backup" in refused.value.remedy


def test_a_journal_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    journal = state_of("interrupted", tmp_path) / "journal.sqlite"
    connection = sqlite3.connect(journal)
    connection.execute("PRAGMA user_version = 1000")
    connection.close()
    with pytest.raises(JournalError) as refused:
        JournalStore.open(journal)
    assert "install" in refused.value.remedy


def test_a_journal_without_its_key_is_refused_with_what_to_do(tmp_path: Path) -> None:
    state = state_of("interrupted", tmp_path)
    (state / "coordinator.key").unlink()
    store = JournalStore.open(state / "journal.sqlite")
    with pytest.raises(JournalError) as refused:
        store.identity()
    store.close()
    assert "coordinator.key" in refused.value.remedy and "--state" in refused.value.remedy


@pytest.mark.parametrize("name", ["coordinator.key", "operator.key"])
def test_a_key_that_others_may_read_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    path = state_of("interrupted", tmp_path) / name
    path.chmod(0o644)
    with pytest.raises(ConfigError) as refused:
        Identity.read(path)
    assert f"chmod 600 {path}" in refused.value.remedy
