"""The operator's commands against real access control, over encrypted sockets on loopback."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from gridtrain.cli import member_lookup
from gridtrain.cli.invite import explanation
from gridtrain.cli.main import cli
from gridtrain.cli.members import member_rows, render
from gridtrain.core import messages as m
from gridtrain.core.group.invitation import Invitation, parse
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused
from gridtrain.network.transport import interface
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.quantities import format_duration, parse_duration_s
from gridtrain.runtime.client import operator_client
from gridtrain.runtime.client.coordinator_client import CoordinatorClient
from gridtrain.runtime.client.endpoint_file import OPERATOR_KEY, EndpointFile
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient
from gridtrain_coordinator.access.authorization import Authorization

ANNA, BERT, CARL = ("a1" * 32, "b2" * 32, "a1a1a1" + "c3" * 29)
MEMBERS = [
    {"rank": 1, "name": "anna", "peer": ANNA, "state": "active", "strikes": 0, "reach": "direct"},
    {"rank": 0, "name": "[red]bert", "peer": BERT, "state": "active", "strikes": 1, "reach": "relayed"},
]


@dataclass
class AccessServer:
    """A coordinator with access control only, in a thread, and its files."""

    folder: Path
    keys: Identity = field(default_factory=Identity.generate)
    members: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    left: dict[str, str] = field(default_factory=dict)  # names of workers that are not connected

    def __enter__(self) -> AccessServer:
        operator = Identity.load_or_create(self.folder / OPERATOR_KEY)
        self.access = Authorization(run="default", operator=operator.public, coordinator=self.keys.public)
        self.transport = ZeroMQTransport(
            self.keys,
            "test",
            gate=lambda key: interface.ConnectionRole(self.access.access_role(key, time.time()).value),
        )
        here = self.transport.listen("tcp://127.0.0.1:0")
        self.contact = EndpointFile("tcp://192.0.2.7:7700", here, self.keys.public, "default", True)
        self.published = self.contact.published(self.folder)
        self.published.__enter__()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.published.__exit__(None, None, None)
        self.stop.set()
        self.transport.wake()
        self.thread.join(10.0)

    def serve(self) -> None:
        while not self.stop.is_set():
            for event in self.transport.poll(1.0):
                if isinstance(event, interface.Received):
                    self.transport.send(event.peer, self.answer(event.peer, event.message))
        self.transport.close()

    def answer(self, peer: m.PeerId, message: m.Message) -> m.Message:
        if isinstance(message, m.Invite | m.RemoveWorker | m.Unban):
            removed = message.peer.hex() if isinstance(message, m.RemoveWorker) else ""
            name = next((str(row["name"]) for row in self.members if row["peer"] == removed), "")
            return self.access.handle_order(peer, message, time.time(), name).reply
        status = self.access.status(time.time())
        status["removed"] = [{"peer": peer.hex()} for peer in self.access.removed_members()]
        for row in (*status["enrolled"], *status["removed"]):
            row.update({"name": self.left[row["peer"]]} if row["peer"] in self.left else {})
        reply = {
            "run": "default",
            "finished": self.finished,
            "members": self.members,
            "door": status,
        }
        return m.StatusReply(json.dumps(reply).encode())

    def enrol(self, *peers: str) -> None:
        key = Identity.generate().public
        self.access.invite(key, len(peers), 60.0, time.time())
        for peer in peers:
            answer = self.access.enrol(key, bytes.fromhex(peer), "", time.time())
            assert isinstance(answer.reply, m.Enrolled)

    def role(self, key: str | bytes) -> str:
        return str(self.access.access_role(bytes.fromhex(key) if isinstance(key, str) else key, time.time()))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AccessServer]:
    with AccessServer(tmp_path) as server:
        yield server


def gridtrain(server: AccessServer, command: str) -> Result:
    return CliRunner().invoke(cli, [*command.split(), "--state", str(server.folder)])


def output_of(server: AccessServer, command: str) -> str:
    result = gridtrain(server, command)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refusal(result: Result, code: int) -> str:
    assert isinstance(result.exception, GridtrainError), result.output
    assert result.exception.exit_code == code and result.exception.remedy
    assert result.stdout == ""
    return result.exception.reason


# -- invite ----------------------------------------------------------------------------------------


def test_only_the_invitation_is_written_to_stdout_and_it_is_valid(server: AccessServer) -> None:
    result = gridtrain(server, "invite --uses 3 --expires 12h")
    assert result.exit_code == 0, result.output
    invitation = parse(result.stdout)
    assert result.stdout == invitation.text() + "\n", "so that $(gridtrain invite) works"
    assert invitation.address == "tcp://192.0.2.7:7700" and invitation.coordinator == server.keys.public
    assert server.role(Identity.from_secret(invitation.token).public) == "guest"
    (row,) = server.access.status(time.time())["invitations"]
    assert (row["uses"], row["used"]) == (3, 0) and 43_000 < row["left_s"] <= 43_200

    explained = result.stderr
    assert 'run "default" for 3 workers, valid for 12 h (until ' in explained.replace("\n", " ")
    assert max(map(len, explained.splitlines())) < 80
    assert "  gridtrain worker INVITATION -- python train.py" in explained
    assert invitation.text() not in explained, "a log of stderr must not reveal it"


def test_the_token_is_not_sent_to_the_coordinator(
    server: AccessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[m.Message] = []
    answer = server.answer

    def recording(peer: m.PeerId, message: m.Message) -> m.Message:
        received.append(message)
        return answer(peer, message)

    monkeypatch.setattr(server, "answer", recording)
    invitation = parse(output_of(server, "invite"))
    command = m.Invite(Identity.from_secret(invitation.token).public, 1, 7 * 86_400.0)
    assert received == [command, m.StatusRequest()]


def test_an_invitation_may_have_another_address(server: AccessServer) -> None:
    assert parse(output_of(server, "invite --address lab-pc:7701")).address == "tcp://lab-pc:7701"
    port = parse(output_of(server, "invite")).address.rpartition(":")[2]
    assert parse(output_of(server, "invite --address lab-pc")).address == f"tcp://lab-pc:{port}"
    for wildcard in ("0.0.0.0", "[::]:7701"):
        assert "other machines can connect to" in refusal(
            gridtrain(server, f"invite --address {wildcard}"), 2
        )


def test_an_invitation_is_withdrawn(server: AccessServer) -> None:
    text = output_of(server, "invite --uses 9").strip()
    key = Identity.from_secret(parse(text).token).public
    assert server.role(key) == "guest"
    assert output_of(server, f"invite --withdraw {text}") == ""
    assert server.role(key) == "guest", "its holder is told that it was withdrawn"
    assert "no valid invitation" in refusal(gridtrain(server, f"invite --withdraw {text}"), 4)
    assert "no invitation was given" in refusal(gridtrain(server, "invite --withdraw="), 2)


def test_a_refusal_of_the_coordinator_is_shown(server: AccessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gridtrain_coordinator.access.authorization_limits.MAX_INVITATIONS", 0)
    assert "0 invitations are open" in refusal(gridtrain(server, "invite"), 4)


@pytest.mark.parametrize("finished", [False, True])
def test_an_invitation_to_a_finished_run_warns(server: AccessServer, finished: bool) -> None:
    server.finished = finished
    result = gridtrain(server, "invite")
    assert result.exit_code == 0 and parse(result.stdout)
    assert ('The run "default" has finished: workers that use' in result.stderr) == finished


def test_an_invitation_for_this_machine_only_is_explained() -> None:
    local = Invitation("tcp://127.0.0.1:7711", bytes(32), bytes(32), "r", encrypted=False)
    explained = explanation(local, 1, 60.0, 0.0, False)
    assert "for 1 worker, valid for 1 min" in explained and "--listen tcp://0.0.0.0:7711" in explained
    over_ipv6 = explanation(replace(local, address="tcp://[::1]:7711"), 1, 60.0, 0.0, False)
    assert '--listen "tcp://[::]:7711"' in over_ipv6
    wider = explanation(local, 1, 60.0, 0.0, False, "tcp://192.0.2.2:7711")
    assert "create an invitation with\n  --address tcp://192.0.2.2:7711" in wider and "--listen" not in wider
    key = " ".join(["0000"] * 8)
    assert key not in explained and key in explanation(local, 1, 60.0, 0.0, True), (
        "shown if the volunteer sees it too"
    )
    assert "gridtrain worker INVITATION --unencrypted --" in explained


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("15m", 900.0),
        ("12h", 43_200.0),
        ("7d", 604_800.0),
        (" 1.5h ", 5400.0),
        ("7 d", 604_800.0),
    ],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1w", "1e3s", "9" * 400 + "s", "infd"])
def test_invalid_durations_are_refused(text: str) -> None:
    result = CliRunner().invoke(cli, ["invite", "--expires", text])
    assert result.exit_code == 2 and "use, for instance, 90s, 15m, 12h or 7d" in result.output


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59.6, "1 min"), (3600, "1 h"), (604_799, "6 d 23 h"), (86_460, "1 d"), (-5, "0 s")],
)
def test_durations_are_formatted(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


# -- members ---------------------------------------------------------------------------------------

DRAWN = """\
rank name      key          state  violations reach
   0 [red]bert b2b2b2b2b2b2 active          1 relayed
   1 anna      a1a1a1a1a1a1 active          0 direct
   - (away)    a1a1a1c3c3c3 away            0 -
invitation {id}: 2 of 5 uses, 59 min 59 s left
banned d4d4d4d4d4d4: spam  [2J
violation by [red]bert b2b2b2b2b2b2, reported by coordinator: no msgpack
"""


def test_members_are_shown_as_a_table(server: AccessServer) -> None:
    server.members = MEMBERS
    key = bytes(range(32))
    now_s = time.time()
    server.access.invite(key, 5, 3600.0, now_s)
    for peer in (ANNA, BERT):
        server.access.enrol(key, bytes.fromhex(peer), "", now_s)
    server.enrol(CARL)
    server.access.record_violation(bytes.fromhex(BERT), "no msgpack", None, 0.0)
    server.access.expel(b"\xd4" * 32, True, "spam \x1b[2J")
    drawn = "".join(line.rstrip() + "\n" for line in output_of(server, "members").splitlines())
    shown_id = server.access.status(now_s)["invitations"][0]["id"]
    drawn = re.sub("(59 min [0-9]+ s|1 h) left", "59 min 59 s left", drawn)
    assert drawn == DRAWN.format(id=shown_id)


def test_a_narrow_terminal_cuts_neither_names_nor_keys_nor_states() -> None:
    row = {"name": "a-long-volunteer-name", "peer": BERT, "state": "following", "rank": 1, "strikes": 0}
    console = Console(file=io.StringIO(), width=40)
    console.print(render({"members": [row]}, console.width))
    assert isinstance(console.file, io.StringIO)
    heading, first, second = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert heading == "rank name        key          state"
    assert first == "   1 a-long-volu b2b2b2b2b2b2 following" and second == "     nteer-name"


def test_members_are_shown_as_json(server: AccessServer) -> None:
    server.members = MEMBERS
    server.enrol(ANNA)
    shown = json.loads(output_of(server, "members --json"))
    assert shown["run"] == "default" and shown["members"] == MEMBERS
    assert [row["peer"] for row in shown["door"]["enrolled"]] == [ANNA]


def test_a_run_without_members_says_so(server: AccessServer) -> None:
    assert "no worker has been admitted yet; create an invitation with gridtrain invite" in output_of(
        server, "members"
    )


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"members": 3, "door": []},
        {"members": [None, {"rank": "x", "peer": 7, "name": []}], "door": {"enrolled": [{}, {"peer": None}]}},
    ],
)
def test_any_status_can_be_shown(status: dict[str, Any]) -> None:
    assert all(len(cells) == 6 for cells in member_rows(status))
    assert member_lookup.known_keys(status) == {}


# -- kick, ban, unban ------------------------------------------------------------------------------


def test_a_worker_is_kicked_by_name_and_banned_by_key(server: AccessServer) -> None:
    server.members = MEMBERS
    server.enrol(ANNA, BERT)
    assert (
        output_of(server, "kick anna")
        == "anna: a1a1a1a1a1a1 is removed; it needs a new invitation to rejoin\n"
    )
    assert server.role(ANNA) == "stranger"
    assert (
        output_of(server, "ban b2B2b2 --reason spam")
        == "[red]bert: b2b2b2b2b2b2 is banned until you unban it\n"
    )
    assert server.access.status(time.time())["banned"] == [
        {"peer": BERT, "name": "[red]bert", "reason": "spam"}
    ]
    assert "can rejoin" in output_of(server, "unban b2b2b2")
    assert server.access.status(time.time())["banned"] == []


def test_a_ban_is_lifted_by_the_name_that_was_banned(server: AccessServer) -> None:
    server.members = MEMBERS
    server.enrol(ANNA, BERT)
    output_of(server, "ban anna --reason spam")
    server.members = [{**MEMBERS[1], "name": "anna"}]  # another worker with that name, which is not banned
    assert "banned anna a1a1a1a1a1a1: spam" in output_of(server, "members")
    lifted = "anna: a1a1a1a1a1a1 is no longer banned; it can rejoin with a new invitation\n"
    assert output_of(server, "unban anna") == lifted
    assert "matches no member" in refusal(gridtrain(server, "unban anna"), 2)


def test_a_worker_that_left_is_banned_by_name(server: AccessServer) -> None:
    server.enrol(CARL)
    server.left = {CARL: "carl"}
    assert re.search("- carl +a1a1a1c3c3c3 away", output_of(server, "members"))
    assert output_of(server, "ban carl") == "carl: a1a1a1c3c3c3 is banned until you unban it\n"
    assert server.role(CARL) == "stranger"


def test_a_removed_worker_is_banned_by_name_or_digits(server: AccessServer) -> None:
    server.enrol(ANNA, CARL)
    server.left = {CARL: "carl", ANNA: "anna"}
    output_of(server, "kick carl")
    output_of(server, "kick anna")
    assert "removed carl a1a1a1c3c3c3: a new invitation admits it again" in output_of(server, "members")
    assert output_of(server, "ban carl") == "carl: a1a1a1c3c3c3 is banned until you unban it\n"
    assert output_of(server, "ban a1a1a1a1") == "anna: a1a1a1a1a1a1 is banned until you unban it\n"
    drawn = output_of(server, "members")
    assert "removed" not in drawn and "banned a1a1a1c3c3c3" in drawn
    assert "known banned members" in refusal(gridtrain(server, "unban dora"), 2)


def test_a_key_can_be_banned_before_it_joins(server: AccessServer) -> None:
    assert "is banned" in output_of(server, f"ban {CARL}")
    assert "matches no member" in refusal(gridtrain(server, f"kick {CARL}"), 2)
    assert "is not banned" in refusal(gridtrain(server, f"unban {ANNA}"), 4)


def test_an_ambiguous_or_unknown_member_is_refused(server: AccessServer) -> None:
    server.members = MEMBERS
    server.enrol(ANNA, BERT, CARL)
    both = refusal(gridtrain(server, "kick a1a1a1"), 2)
    assert both == "'a1a1a1' matches 2 members: anna a1a1a1a1a1a1, (away) a1a1a1c3c3c3"
    unknown = refusal(gridtrain(server, "kick dora"), 2)
    assert unknown == (
        "'dora' matches no member; known members: anna a1a1a1a1a1a1, (away) a1a1a1c3c3c3, "
        "[red]bert b2b2b2b2b2b2"
    )
    assert "matches no member" in refusal(gridtrain(server, "kick a1a1a"), 2), "5 digits are too few"
    assert "matches no member" in refusal(gridtrain(server, "kick (away)"), 2)
    assert all(server.role(peer) == "peer" for peer in (ANNA, BERT, CARL))


def test_equal_names_and_a_name_like_a_key_are_ambiguous() -> None:
    known = {ANNA: "anna", BERT: "anna", CARL: "b2b2b2"}
    for member in ("anna", "b2b2b2"):
        with pytest.raises(ConfigError, match=r"matches 2 members: .*specify more digits"):
            member_lookup.resolve_member(member, known)
    assert member_lookup.resolve_member(CARL, known) == bytes.fromhex(CARL)
    assert member_lookup.resolve_member("anna", known, present={BERT, CARL}) == bytes.fromhex(BERT)


def test_a_long_list_of_candidates_is_truncated() -> None:
    known = {f"{number:064x}": "x" for number in range(30)}
    with pytest.raises(ConfigError, match="and 20 more -> "):
        member_lookup.resolve_member("x", known)


# -- the coordinator's endpoint --------------------------------------------------------------------


def test_a_missing_endpoint_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(cli, ["invite", "--run", "mine"])
    assert "no coordinator of the run" in refusal(result, 3)
    assert "gridtrain coordinator --run mine" in str(result.exception)
    for run in ("../other", ""):
        with pytest.raises(ConfigError, match="is not a valid run name"):
            CoordinatorEndpoint.find(run)


def test_the_endpoint_belongs_to_the_named_run(server: AccessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(server.folder))
    (server.folder / "gridtrain").mkdir()
    (server.folder / "gridtrain" / "default").symlink_to(server.folder)
    (server.folder / "gridtrain" / "mine").symlink_to(server.folder)
    assert CoordinatorEndpoint.find().file.here == server.contact.here
    with pytest.raises(ConfigError, match='belongs to the run "default", not to "mine" -> use --run default'):
        CoordinatorEndpoint.find("mine")


@pytest.mark.parametrize(
    ("here", "address"),
    [("tcp://127.0.0.2:{port}", "tcp://127.0.0.3:1"), ("tcp://127.0.0.2:1", "tcp://localhost:{port}")],
    ids=["loopback", "advertised"],
)
def test_a_coordinator_is_found_after_the_address_of_this_machine_has_changed(
    server: AccessServer, here: str, address: str
) -> None:
    port = server.contact.here.rpartition(":")[2]
    old = (address.format(port=port), here.format(port=port))
    EndpointFile(*old, server.keys.public, "default", True).write(server.folder)
    assert json.loads(output_of(server, "status --json"))["run"] == "default"


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_starting_coordinator_is_awaited(
    server: AccessServer, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Also if the file of one that was killed is still there."""
    server.published.__exit__(None, None, None)
    if is_killed:
        server.contact.write(server.folder)
    started = server.contact.published(server.folder)
    waited = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: started.__enter__())
    monkeypatch.setattr(operator_client, "time", waited)
    found = CoordinatorEndpoint.find(state=server.folder, wait_s=20.0)
    assert found.file.coordinator == server.keys.public
    assert not EndpointFile.is_abandoned(server.folder), "the started one was awaited"
    started.__exit__(None, None, None)


@pytest.fixture
def brief_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands wait for 0.2 s for each answer."""
    ask = CoordinatorClient.ask
    monkeypatch.setattr(CoordinatorClient, "ask", lambda self, question, _: ask(self, question, 0.2))


@pytest.mark.parametrize("command", ["status", "finish", "invite"])
def test_a_coordinator_of_this_machine_that_was_killed_is_named(
    tmp_path: Path, brief_questions: None, command: str
) -> None:
    Identity.load_or_create(tmp_path / OPERATOR_KEY)
    contact = EndpointFile("tcp://192.0.2.7:7700", "tcp://127.0.0.1:1", b"k" * 32, "mine", True)
    contact.write(tmp_path)
    result = CliRunner().invoke(cli, [command, "--state", str(tmp_path)])
    said = 'the coordinator of the run "mine", tcp://192.0.2.7:7700, is not running on this machine'
    assert refusal(result, 3) == said
    assert "restart it with `gridtrain coordinator`, " in str(result.exception)
    with contact.published(tmp_path):  # it runs, but cannot be reached
        result = CliRunner().invoke(cli, [command, "--state", str(tmp_path)])
        reason = refusal(result, 3)
        assert "the coordinator at tcp://127.0.0.1:1 cannot be reached" in reason
        assert reason.endswith("(tried: tcp://127.0.0.1:1, tcp://192.0.2.7:7700)")


@pytest.mark.parametrize("command", ["status", "finish", "invite"])
def test_a_coordinator_of_this_machine_that_does_not_answer_is_named(
    tmp_path: Path, brief_questions: None, command: str
) -> None:
    """It listens, but its process is suspended or waits for a disk."""
    Identity.load_or_create(tmp_path / OPERATOR_KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with EndpointFile("tcp://192.0.2.7:7700", here, b"k" * 32, "mine", True).published(tmp_path):
            result = CliRunner().invoke(cli, [command, "--state", str(tmp_path)])
    said = f"the coordinator (process {os.getpid()}, {tmp_path}) is running but does not answer"
    assert refusal(result, 3) == said and "see its log" in str(result.exception)


@pytest.mark.parametrize("has_state", [False, True])
def test_after_a_coordinator_was_stopped_the_command_that_continues_the_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "gridtrain" / "mine"
    folder.mkdir(parents=True)
    Identity.load_or_create(folder / OPERATOR_KEY)
    with EndpointFile("tcp://192.0.2.7:7700", "tcp://127.0.0.1:1", b"k" * 32, "mine", True).published(folder):
        pass
    chosen = ("--state", str(folder)) if has_state else ("--run", "mine")
    result = CliRunner().invoke(cli, ["status", *chosen])
    assert refusal(result, 3) == f"the coordinator whose state folder is {folder} is not running"
    assert "restart it with `gridtrain coordinator`, " in str(result.exception)
    assert "; a run that has finished cannot be restarted: " in str(result.exception)


@pytest.mark.parametrize("has_state", [False, True])
def test_waiting_for_a_coordinator_is_announced_and_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    now_s, said_at_s = [0.0], []

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(operator_client, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    echo = click.echo
    monkeypatch.setattr(click, "echo", lambda *a, **k: said_at_s.append(now_s[0]) or echo(*a, **k))
    chosen = ("--state", str(tmp_path)) if has_state else ()
    result = CliRunner().invoke(cli, ["invite", "--wait", "30s", *chosen])
    assert "no coordinator" in refusal(result, 3)
    where = (
        f"a coordinator in {tmp_path}" if has_state else 'a coordinator of the run "default" on this machine'
    )
    assert result.stderr.startswith(f"gridtrain: waiting up to 30 s for {where}")
    assert said_at_s == [0.0] and now_s[0] == pytest.approx(30.0)


def test_the_operators_key_must_be_private(server: AccessServer) -> None:
    (server.folder / OPERATOR_KEY).chmod(0o640)
    assert "others may read it" in refusal(gridtrain(server, "invite"), 2)


def test_another_operators_key_is_denied(server: AccessServer) -> None:
    (server.folder / OPERATOR_KEY).unlink()
    result = gridtrain(server, "invite")
    assert "cannot be read" in refusal(result, 2) and isinstance(result.exception, ConfigError)
    assert "restart the coordinator, which creates operator.key" in result.exception.remedy
    Identity.generate().write(server.folder / OPERATOR_KEY)
    result = gridtrain(server, "invite")
    assert "does not know the key in operator.key" in refusal(result, 4)
    assert isinstance(result.exception, JoinRefused) and result.exception.code == "denied"
    assert server.access.status(time.time())["invitations"] == []


def test_a_members_key_cannot_send_commands(server: AccessServer) -> None:
    member = Identity.generate()
    server.enrol(member.public.hex(), BERT)
    contact = CoordinatorEndpoint(server.contact, member)
    with pytest.raises(JoinRefused, match="only the run's owner may do that"):
        OperatorClient(contact).order(m.RemoveWorker(bytes.fromhex(BERT), True, ""))
    assert server.role(BERT) == "peer"


def test_an_answer_with_another_key_is_not_accepted(server: AccessServer) -> None:
    stranger = EndpointFile(server.contact.address, server.contact.here, b"\x01" * 32, "default", True)
    stranger.write(server.folder)
    operator = OperatorClient(CoordinatorEndpoint.find(state=server.folder))
    with pytest.raises(CoordinatorUnreachable):
        operator.order(m.Unban(bytes(32)), timeout_s=0.5)


def test_commands_on_one_machine_run_one_at_a_time(server: AccessServer) -> None:
    """They use one key, and a coordinator serves only the latest connection of a key."""
    watching = OperatorClient(CoordinatorEndpoint.find(state=server.folder))
    assert watching.status()["run"] == "default"  # stays open, as with `status --watch`
    made: list[str] = []

    def invite() -> None:
        operator = OperatorClient(CoordinatorEndpoint.find(state=server.folder))
        made.append(operator.invite(1, 60.0).text())
        assert operator.status()["run"] == "default"

    threads = [threading.Thread(target=invite) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(set(made)) == 6 == len(server.access.status(time.time())["invitations"])
    assert watching.status()["run"] == "default"


def test_a_file_system_without_locks_causes_no_wait(
    server: AccessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("gridtrain.runtime.client.operator_client.fcntl.flock", no_locks)
    monkeypatch.setattr(
        "gridtrain.runtime.client.operator_client.POLL_INTERVAL_S", math.inf
    )  # a wait would take the whole time
    waited: list[float] = []
    monkeypatch.setattr("gridtrain.runtime.client.operator_client.time.sleep", waited.append)
    operator = OperatorClient(CoordinatorEndpoint.find(state=server.folder))
    assert operator.status()["run"] == "default"
    assert waited == []


def test_a_new_invitation_is_printed_even_if_the_next_request_fails(
    server: AccessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a valid invitation would exist that its owner does not know."""

    def away(operator: OperatorClient, timeout_s: float = 0.0) -> dict[str, Any]:
        raise CoordinatorUnreachable("it was stopped", remedy="start it")

    monkeypatch.setattr(OperatorClient, "status", away)
    result = gridtrain(server, "invite")
    assert isinstance(result.exception, CoordinatorUnreachable)
    parse(result.stdout.strip())
    assert len(server.access.status(time.time())["invitations"]) == 1
