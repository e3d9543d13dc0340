"""The operator's commands against a real door, over encrypted sockets on loopback."""

from __future__ import annotations

import errno
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gridtrain.cli import operator_arguments
from gridtrain.cli.invite import explanation
from gridtrain.cli.main import cli
from gridtrain.cli.members import member_rows
from gridtrain.core import messages as m
from gridtrain.core.group.invitation import Invitation, parse
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused
from gridtrain.network.transport import interface
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.runtime.client.endpoint_file import CONTACT_FILE, OPERATOR_KEY, EndpointFile
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient
from gridtrain_coordinator.access.authorization import Authorization

ANNA, BERT, CARL = ("a1" * 32, "b2" * 32, "a1a1a1" + "c3" * 29)
MEMBERS = [
    {"rank": 1, "name": "anna", "peer": ANNA, "state": "active", "strikes": 0, "reach": "direct"},
    {"rank": 0, "name": "[red]bert", "peer": BERT, "state": "active", "strikes": 1, "reach": "relayed"},
]


@dataclass
class Desk:
    """A coordinator that has nothing but a door, in a thread, beside its files."""

    folder: Path
    keys: Identity = field(default_factory=Identity.generate)
    members: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    left: dict[str, str] = field(default_factory=dict)  # names of workers that are not connected

    def __enter__(self) -> Desk:
        operator = Identity.load_or_create(self.folder / OPERATOR_KEY)
        self.door = Authorization(run="default", operator=operator.public, coordinator=self.keys.public)
        self.transport = ZeroMQTransport(
            self.keys,
            "test",
            gate=lambda key: interface.ConnectionRole(self.door.access_role(key, time.time()).value),
        )
        here = self.transport.listen("tcp://127.0.0.1:0")
        self.contact = EndpointFile("tcp://192.0.2.7:7700", here, self.keys.public, "default", True)
        self.contact.write(self.folder)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
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
            expelled = message.peer.hex() if isinstance(message, m.RemoveWorker) else ""
            name = next((str(line["name"]) for line in self.members if line["peer"] == expelled), "")
            return self.door.handle_order(peer, message, time.time(), name).reply
        access = self.door.status(time.time())
        access["removed"] = [{"peer": peer.hex()} for peer in self.door.removed_members()]
        for row in (*access["enrolled"], *access["removed"]):
            row.update({"name": self.left[row["peer"]]} if row["peer"] in self.left else {})
        picture = {
            "run": "default",
            "finished": self.finished,
            "members": self.members,
            "door": access,
        }
        return m.StatusReply(json.dumps(picture).encode())

    def enrol(self, *peers: str) -> None:
        key = Identity.generate().public
        self.door.invite(key, len(peers), 60.0, time.time())
        for peer in peers:
            answer = self.door.enrol(key, bytes.fromhex(peer), "", time.time())
            assert isinstance(answer.reply, m.Enrolled)

    def standing(self, key: str | bytes) -> str:
        return str(self.door.access_role(bytes.fromhex(key) if isinstance(key, str) else key, time.time()))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path) as desk:
        yield desk


def gridtrain(desk: Desk, line: str) -> Result:
    return CliRunner().invoke(cli, [*line.split(), "--state", str(desk.folder)])


def fine(desk: Desk, line: str) -> str:
    result = gridtrain(desk, line)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def complaint(result: Result, code: int) -> str:
    assert isinstance(result.exception, GridtrainError), result.output
    assert result.exception.exit_code == code and result.exception.remedy
    assert result.stdout == ""
    return result.exception.reason


# -- invite ----------------------------------------------------------------------------------------


def test_an_invitation_is_all_that_stdout_gets_and_it_opens_the_door(desk: Desk) -> None:
    result = gridtrain(desk, "invite --uses 3 --expires 12h")
    assert result.exit_code == 0, result.output
    invitation = parse(result.stdout)
    assert result.stdout == invitation.text() + "\n", "so that $(gridtrain invite) works"
    assert invitation.address == "tcp://192.0.2.7:7700" and invitation.coordinator == desk.keys.public
    assert desk.standing(Identity.from_secret(invitation.token).public) == "guest"
    (line,) = desk.door.status(time.time())["invitations"]
    assert (line["uses"], line["used"]) == (3, 0) and 43_000 < line["left_s"] <= 43_200

    told = result.stderr
    assert 'run "default" for 3 workers, valid for 12 h (until ' in told
    assert "  gridtrain worker INVITATION -- python train.py" in told
    assert invitation.text() not in told, "a log of stderr lets nobody in"


def test_the_token_never_reaches_the_coordinator(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[m.Message] = []
    answer = desk.answer

    def listening(peer: m.PeerId, message: m.Message) -> m.Message:
        heard.append(message)
        return answer(peer, message)

    monkeypatch.setattr(desk, "answer", listening)
    invitation = parse(fine(desk, "invite"))
    order = m.Invite(Identity.from_secret(invitation.token).public, 1, 7 * 86_400.0)
    assert heard == [order, m.StatusRequest()]


def test_another_address_for_this_volunteer(desk: Desk) -> None:
    assert parse(fine(desk, "invite --address lab-pc")).address == "tcp://lab-pc:7700"


def test_an_invitation_is_withdrawn(desk: Desk) -> None:
    text = fine(desk, "invite --uses 9").strip()
    guest = Identity.from_secret(parse(text).token).public
    assert desk.standing(guest) == "guest"
    assert fine(desk, f"invite --withdraw {text}") == ""
    assert desk.standing(guest) == "guest", "to be told that it was withdrawn"
    assert "no valid invitation" in complaint(gridtrain(desk, f"invite --withdraw {text}"), 4)


def test_the_coordinator_refuses(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gridtrain_coordinator.access.authorization_rules.MAX_INVITATIONS", 0)
    assert "0 invitations are open" in complaint(gridtrain(desk, "invite"), 4)


@pytest.mark.parametrize("finished", [False, True])
def test_an_invitation_to_a_finished_run_warns(desk: Desk, finished: bool) -> None:
    desk.finished = finished
    result = gridtrain(desk, "invite")
    assert result.exit_code == 0 and parse(result.stdout)
    assert ('The run "default" is finished: workers that use' in result.stderr) == finished


def test_an_invitation_for_this_machine_alone_says_so() -> None:
    local = Invitation("tcp://127.0.0.1:7711", bytes(32), bytes(32), "r", encrypted=False)
    told = explanation(local, 1, 60.0, 0.0, False)
    assert "for 1 worker, valid for 1 min" in told and "--listen tcp://0.0.0.0:7711" in told
    key = " ".join(["0000"] * 8)
    assert key not in told and key in explanation(local, 1, 60.0, 0.0, True), "the volunteer sees it, too"
    assert "gridtrain worker INVITATION --unencrypted --" in told


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
def test_durations(text: str, seconds: float) -> None:
    context = click.Context(cli)
    assert operator_arguments.parse_duration(context, cli.params[0], text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1w", "1e3s", "9" * 400 + "s", "infd"])
def test_no_durations(text: str) -> None:
    result = CliRunner().invoke(cli, ["invite", "--expires", text])
    assert result.exit_code == 2 and "use, for instance, 90s, 15m, 12h or 7d" in result.output


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59.6, "1 min"), (3600, "1 h"), (604_799, "6 d 23 h"), (86_460, "1 d"), (-5, "0 s")],
)
def test_durations_as_they_are_shown(seconds: float, shown: str) -> None:
    assert operator_arguments.format_duration(seconds) == shown


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


def test_the_table(desk: Desk) -> None:
    desk.members = MEMBERS
    key = bytes(range(32))
    now_s = time.time()
    desk.door.invite(key, 5, 3600.0, now_s)
    for peer in (ANNA, BERT):
        desk.door.enrol(key, bytes.fromhex(peer), "", now_s)
    desk.enrol(CARL)
    desk.door.record_violation(bytes.fromhex(BERT), "no msgpack", None, 0.0)
    desk.door.expel(b"\xd4" * 32, True, "spam \x1b[2J")
    drawn = "".join(line.rstrip() + "\n" for line in fine(desk, "members").splitlines())
    shown_id = desk.door.status(now_s)["invitations"][0]["id"]
    drawn = re.sub("(59 min [0-9]+ s|1 h) left", "59 min 59 s left", drawn)
    assert drawn == DRAWN.format(id=shown_id)


def test_the_same_as_json(desk: Desk) -> None:
    desk.members = MEMBERS
    desk.enrol(ANNA)
    shown = json.loads(fine(desk, "members --json"))
    assert shown["run"] == "default" and shown["members"] == MEMBERS
    assert [line["peer"] for line in shown["door"]["enrolled"]] == [ANNA]


def test_nobody_yet(desk: Desk) -> None:
    assert "no worker has been admitted yet; create an invitation with gridtrain invite" in fine(
        desk, "members"
    )


@pytest.mark.parametrize(
    "picture",
    [
        {},
        {"members": 3, "door": []},
        {"members": [None, {"rank": "x", "peer": 7, "name": []}], "door": {"enrolled": [{}, {"peer": None}]}},
    ],
)
def test_whatever_the_coordinator_says_can_be_drawn(picture: dict[str, Any]) -> None:
    assert all(len(cells) == 6 for cells in member_rows(picture))
    assert operator_arguments.known_keys(picture) == {}


# -- kick, ban, unban ------------------------------------------------------------------------------


def test_kick_by_name_and_ban_by_key(desk: Desk) -> None:
    desk.members = MEMBERS
    desk.enrol(ANNA, BERT)
    assert (
        fine(desk, "kick anna") == "anna: a1a1a1a1a1a1 is removed; it needs a new invitation to join again\n"
    )
    assert desk.standing(ANNA) == "stranger"
    assert fine(desk, "ban b2B2b2 --reason spam") == "[red]bert: b2b2b2b2b2b2 is banned until you unban it\n"
    assert desk.door.status(time.time())["banned"] == [{"peer": BERT, "name": "[red]bert", "reason": "spam"}]
    assert "can join again" in fine(desk, "unban b2b2b2")
    assert desk.door.status(time.time())["banned"] == []


def test_a_ban_is_lifted_by_the_name_that_it_was_given_by(desk: Desk) -> None:
    desk.members = MEMBERS
    desk.enrol(ANNA, BERT)
    fine(desk, "ban anna --reason spam")
    desk.members = [{**MEMBERS[1], "name": "anna"}]  # another one of that name, who is not banned
    assert "banned anna a1a1a1a1a1a1: spam" in fine(desk, "members")
    lifted = "anna: a1a1a1a1a1a1 is no longer banned; it can join again with a new invitation\n"
    assert fine(desk, "unban anna") == lifted
    assert "matches no member" in complaint(gridtrain(desk, "unban anna"), 2)


def test_a_worker_that_left_is_banned_by_its_name(desk: Desk) -> None:
    desk.enrol(CARL)
    desk.left = {CARL: "carl"}
    assert re.search("- carl +a1a1a1c3c3c3 away", fine(desk, "members"))
    assert fine(desk, "ban carl") == "carl: a1a1a1c3c3c3 is banned until you unban it\n"
    assert desk.standing(CARL) == "stranger"


def test_a_worker_that_was_removed_is_banned_by_its_name_or_digits(desk: Desk) -> None:
    desk.enrol(ANNA, CARL)
    desk.left = {CARL: "carl", ANNA: "anna"}
    fine(desk, "kick carl")
    fine(desk, "kick anna")
    assert "removed carl a1a1a1c3c3c3: a new invitation admits it again" in fine(desk, "members")
    assert fine(desk, "ban carl") == "carl: a1a1a1c3c3c3 is banned until you unban it\n"
    assert fine(desk, "ban a1a1a1a1") == "anna: a1a1a1a1a1a1 is banned until you unban it\n"
    drawn = fine(desk, "members")
    assert "removed" not in drawn and "banned a1a1a1c3c3c3" in drawn
    assert "known banned members" in complaint(gridtrain(desk, "unban dora"), 2)


def test_a_key_that_never_came_can_be_banned(desk: Desk) -> None:
    assert "is banned" in fine(desk, f"ban {CARL}")
    assert "matches no member" in complaint(gridtrain(desk, f"kick {CARL}"), 2)
    assert "is not banned" in complaint(gridtrain(desk, f"unban {ANNA}"), 4)


def test_who_is_meant_must_be_clear(desk: Desk) -> None:
    desk.members = MEMBERS
    desk.enrol(ANNA, BERT, CARL)
    both = complaint(gridtrain(desk, "kick a1a1a1"), 2)
    assert both == "'a1a1a1' matches 2 members: anna a1a1a1a1a1a1, (away) a1a1a1c3c3c3"
    nobody = complaint(gridtrain(desk, "kick dora"), 2)
    assert nobody == (
        "'dora' matches no member; known members: anna a1a1a1a1a1a1, (away) a1a1a1c3c3c3, "
        "[red]bert b2b2b2b2b2b2"
    )
    assert "matches no member" in complaint(gridtrain(desk, "kick a1a1a"), 2), "5 digits are too few"
    assert "matches no member" in complaint(gridtrain(desk, "kick (away)"), 2)
    assert all(desk.standing(peer) == "peer" for peer in (ANNA, BERT, CARL))


def test_two_of_one_name_and_a_name_like_a_key() -> None:
    known = {ANNA: "anna", BERT: "anna", CARL: "b2b2b2"}
    for who in ("anna", "b2b2b2"):
        with pytest.raises(ConfigError, match=r"matches 2 members: .*specify more digits"):
            operator_arguments.resolve_member(who, known)
    assert operator_arguments.resolve_member(CARL, known) == bytes.fromhex(CARL)
    assert operator_arguments.resolve_member("anna", known, present={BERT, CARL}) == bytes.fromhex(BERT)


def test_a_long_list_of_candidates_is_cut() -> None:
    known = {f"{number:064x}": "x" for number in range(30)}
    with pytest.raises(ConfigError, match="and 20 more -> "):
        operator_arguments.resolve_member("x", known)


# -- where the coordinator is ----------------------------------------------------------------------


def test_no_coordinator_has_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(cli, ["invite", "--run", "mine"])
    assert "no coordinator of the run" in complaint(result, 2)
    assert "gridtrain coordinator --run mine" in str(result.exception)
    for run in ("../other", ""):
        with pytest.raises(ConfigError, match="is not a valid run name"):
            CoordinatorEndpoint.find(run)


def test_the_folder_is_that_of_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(desk.folder))
    (desk.folder / "gridtrain").mkdir()
    (desk.folder / "gridtrain" / "default").symlink_to(desk.folder)
    (desk.folder / "gridtrain" / "mine").symlink_to(desk.folder)
    assert CoordinatorEndpoint.find().local_address == desk.contact.here
    with pytest.raises(ConfigError, match='belongs to the run "default", not to "mine" -> use --run default'):
        CoordinatorEndpoint.find("mine")


def test_a_coordinator_that_is_starting_is_waited_for(desk: Desk) -> None:
    path = desk.folder / CONTACT_FILE
    path.unlink()
    found: list[CoordinatorEndpoint] = []
    thread = threading.Thread(
        target=lambda: found.append(CoordinatorEndpoint.find(state=desk.folder, wait_s=20.0))
    )
    thread.start()
    desk.contact.write(desk.folder)
    thread.join(20.0)
    assert [contact.coordinator for contact in found] == [desk.keys.public]


def test_waiting_for_a_coordinator_has_an_end(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"no coordinator (of the run|is running in)"):
        CoordinatorEndpoint.find(state=tmp_path, wait_s=0.2)
    assert 0.2 <= time.monotonic() - started_s < 10.0


def test_the_operators_key_must_be_private(desk: Desk) -> None:
    (desk.folder / OPERATOR_KEY).chmod(0o640)
    assert "others may read it" in complaint(gridtrain(desk, "invite"), 2)


def test_another_operators_key_is_not_let_in(desk: Desk) -> None:
    (desk.folder / OPERATOR_KEY).unlink()
    Identity.generate().write(desk.folder / OPERATOR_KEY)
    result = gridtrain(desk, "invite")
    assert "does not know the key in operator.key" in complaint(result, 4)
    assert isinstance(result.exception, JoinRefused) and result.exception.code == "denied"
    assert desk.door.status(time.time())["invitations"] == []


def test_a_members_key_gives_no_orders(desk: Desk) -> None:
    member = Identity.generate()
    desk.enrol(member.public.hex(), BERT)
    contact = CoordinatorEndpoint(
        desk.contact.address, desk.contact.here, desk.keys.public, "default", True, member
    )
    with pytest.raises(JoinRefused, match="only the run's owner may do that"):
        OperatorClient(contact).order(m.RemoveWorker(bytes.fromhex(BERT), True, ""))
    assert desk.standing(BERT) == "peer"


def test_whoever_answers_with_another_key_is_no_coordinator(desk: Desk) -> None:
    stranger = EndpointFile(desk.contact.address, desk.contact.here, b"\x01" * 32, "default", True)
    stranger.write(desk.folder)
    operator = OperatorClient(CoordinatorEndpoint.find(state=desk.folder))
    with pytest.raises(CoordinatorUnreachable):
        operator.order(m.Unban(bytes(32)), timeout_s=0.5)


def test_commands_of_one_machine_take_turns(desk: Desk) -> None:
    """They show one key, and a coordinator hears the latest connection of a key only."""
    watching = OperatorClient(CoordinatorEndpoint.find(state=desk.folder))
    assert watching.status()["run"] == "default"  # and it goes on watching, as `status --watch` does
    made: list[str] = []

    def invite() -> None:
        operator = OperatorClient(CoordinatorEndpoint.find(state=desk.folder))
        made.append(operator.invite(1, 60.0).text())
        assert operator.status()["run"] == "default"

    asking = [threading.Thread(target=invite) for _ in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30.0)
    assert len(set(made)) == 6 == len(desk.door.status(time.time())["invitations"])
    assert watching.status()["run"] == "default"


def test_a_file_system_without_locks_costs_no_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("gridtrain.runtime.client.operator_client.fcntl.flock", no_locks)
    monkeypatch.setattr(
        "gridtrain.runtime.client.operator_client.POLL_INTERVAL_S", math.inf
    )  # it would wait for the whole time
    waited: list[float] = []
    monkeypatch.setattr("gridtrain.runtime.client.operator_client.time.sleep", waited.append)
    operator = OperatorClient(CoordinatorEndpoint.find(state=desk.folder))
    assert operator.status()["run"] == "default"
    assert waited == []


def test_an_invitation_that_was_made_is_printed_whatever_comes_next(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there would be a valid one that nobody knows."""

    def away(operator: OperatorClient, timeout_s: float = 0.0) -> dict[str, Any]:
        raise CoordinatorUnreachable("it was stopped", remedy="start it")

    monkeypatch.setattr(OperatorClient, "status", away)
    result = gridtrain(desk, "invite")
    assert isinstance(result.exception, CoordinatorUnreachable)
    parse(result.stdout.strip())
    assert len(desk.door.status(time.time())["invitations"]) == 1
