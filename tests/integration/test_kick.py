"""Workers that the run's owner removes: their scripts end with the reason, and the others go on.

anna   step 10: waits ....................... goes on            to the end
bert   .......... waits for her ............. goes on            to the end    (called anna, too: anna-2)
clara  ..... kicked ... old invitation: no ... new one: is back  to the end
dora   ..... banned ... old and new invitation: no
"""

from __future__ import annotations

from base64 import b64encode
from itertools import chain
from pathlib import Path

import pytest
from zmq.utils import z85

from gridtrain.core.group.invitation import parse
from gridtrain.core.messages import Refused
from gridtrain.network.transport.identity import Identity
from gridtrain_coordinator.access import authorization_limits

pytestmark = pytest.mark.integration

STEP, SAMPLES = 10, 1600
JOB = {"exchange": "dense", "batch_size": 8, "epochs": 1, "samples": SAMPLES}
FINE, REFUSED = 0, 4
KICKED = "ask the run's owner for a new invitation; earlier invitations no longer admit this worker"
BANNED = "ask the run's owner to lift the ban (gridtrain unban {}) and to send a new invitation"


def test_a_kick_and_a_ban_while_the_run_trains(new_group) -> None:
    with new_group(min_workers=4, codes=frozenset({FINE, REFUSED})) as group:
        gate = group.gate()
        anna = group.add("anna", **JOB, gated_step=STEP, step_gate=gate.path)
        bert = group.add("bert", **JOB, flags=("--name", "anna"))
        for name in ("clara", "dora"):
            group.add(name, **JOB)
        group.wait("step 10 at anna", lambda: bool(anna.marked("at gate")))
        assert_workers_of_one_name_are_distinguished(group, anna, bert)

        assert "is removed; it needs a new invitation" in group.operator(
            "kick", "clara", "--reason", "too slow"
        )
        assert end_of(group, "clara") == removed("too slow", KICKED)
        group.wait("a generation without clara", lambda: len(group.events("training")) == 2)
        # Started again it has the same key.  The invitation has uses left, for others.
        assert refusal(group, "clara, again") == refused(authorization_limits.removed_refusal("too slow"))
        new = group.operator("invite", "--uses", "2")
        clara = group.add("clara, invited anew", shows=new, **JOB)
        group.wait("clara", lambda: len(group.events("joined")) == 5)

        assert "is banned until you unban it" in group.operator("ban", "dora", "--reason", "spam")
        dora = next(line["peer"] for line in group.events("joined") if line["name"] == "dora")
        assert end_of(group, "dora") == removed("spam", BANNED.format(dora))
        refusal_of_dora = refusal(group, "dora, again", shows=new)
        assert refusal_of_dora.startswith(f"the run's owner has banned this worker's key {dora}: spam -> ")
        gate.open()
        ends = group.finish()

        assert clara.code == FINE
    generations = [(line["workers"], line["step"]) for line in group.events("generation")]
    assert generations[:2] == [(4, 0), (3, STEP)] and generations[-1][0] == 3
    assert len(ends) == 3 and len({(end["digest"], end["step"]) for end in ends}) == 1
    taken = sorted(chain(*group.samples_by_round().values()))
    assert taken == list(range(SAMPLES)), "the samples of clara and dora went to others"
    assert_nothing_secret_was_said(group, new)


def assert_workers_of_one_name_are_distinguished(group, *both) -> None:
    """The coordinator renames one; both scripts and the agent of the renamed worker say so."""
    assert group.events("renamed") == [
        {"name": "anna-2", "asked": "anna", "reason": "another worker is called anna"}
    ]
    said = "\n".join(worker.said() for worker in both)
    assert said.count("another worker of this run is called anna, so this worker is called anna-2") == 1
    assert said.count("it is called anna-2, and this worker is still called anna") == 1
    says = [line["fields"]["text"] for worker in both for line in worker.lines if line.get("event") == "says"]
    assert says.count("anna is named anna-2 in this run; use --worker anna-2 in commands") == 1


def end_of(group, name: str) -> str:
    """What a removed worker's script says; beside it only the log's error says that it was removed."""
    worker = group.workers[name]
    group.wait(f"the end of {name}", lambda: worker.code is not None)
    said = worker.said() + str(worker.lines)
    assert worker.code == REFUSED and "Traceback" not in said and "exit code" not in said, said
    (error,) = [line for line in worker.lines if "was removed" in str(line)]
    assert (error["event"], error["level"]) == ("error", "error")
    (script,) = [line for line in worker.text if "was removed" in line]
    return script[script.index("JoinRefused") :]


def removed(reason: str, remedy: str) -> str:
    return f"JoinRefused: this worker was removed from the run: {reason} -> {remedy}"


def refused(refusal: Refused) -> str:
    return f"{refusal.reason} -> {refusal.remedy}"


def refusal(group, name: str, **options: str) -> str:
    """Why a worker is not admitted; its script is not started."""
    worker = group.add(name, **JOB, **options)
    group.wait(f"the end of {name}", lambda: worker.code is not None)
    assert worker.code == REFUSED and not worker.text
    (line,) = worker.lines
    return line["fields"]["text"]


def assert_nothing_secret_was_said(group, *invitations: str) -> None:
    """Neither the coordinator's log nor a worker's output has a secret key or a token."""
    tokens = [parse(text).token for text in (group.invitation(), *invitations)]
    files = list(Path(group.folder).rglob("*.key"))
    assert len(files) == 6, "the coordinator's, its operator's, four workers'"
    secrets = tokens + [Identity.read(path).secret for path in files]
    programs = (group.coordinator, *group.workers.values())
    said = "\n".join(f"{program.said()}\n{program.lines}" for program in programs)
    assert all(Identity.read(path).public.hex()[:12] in said for path in files if "worker" in path.name)
    for secret in secrets:
        for form in (secret.hex(), b64encode(secret).decode(), z85.encode(secret).decode()):
            assert form not in said
    assert not [text for text in (group.invitation(), *invitations) if text in said]
