"""The agent starts, stops and restarts a script as a user expects, and leaves no process behind.

To wait until all processes have ended, a test reads the output pipe to its end, because a living process
holds it open.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
from live_coordinator import LiveCoordinator
from zmq.utils import z85

from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import RemoveWorker
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused, TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq import zeromq_transport
from gridtrain.runtime.client import enrollment
from gridtrain.runtime.client.agent_link import CONTROL_VARIABLE
from gridtrain.runtime.client.enrollment import UNKNOWN_INVITATION, Answer, Enrollment
from gridtrain_worker import agent as agent_module
from gridtrain_worker import policy_enforcer, script_processes
from gridtrain_worker import watchdog as watchdog_program
from gridtrain_worker.agent import Job, check_joinable, supervise
from gridtrain_worker.console import JsonConsole
from gridtrain_worker.control_socket import ask_agent, find_worker

pytestmark = pytest.mark.integration
WITHIN_S = 60.0
NO_COORDINATOR = Invitation("tcp://127.0.0.1:1", bytes(32), bytes(32), "default")
StartAgent = Callable[..., "subprocess.Popen[str]"]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def identities(state: Path, invitation: Invitation) -> Path:
    """The keys of this machine for the run."""
    return state / "gridtrain" / invitation.run / "identities" / invitation.coordinator.hex()[:16]


# -- exit codes and environment --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    ],
    ids=["fine", "exit code", "killed"],
)
def test_the_scripts_exit_code_is_passed_on(invitation: Invitation, code: str, expected: int) -> None:
    assert supervise(Job(python(code), invitation)) == expected


def test_a_script_that_raises_is_reported_in_one_line(
    invitation: Invitation, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(Job(python("raise ValueError('no such column')"), invitation)) == 1
    err = capfd.readouterr().err
    assert "ValueError: no such column" in err, "its own traceback is printed"
    (line,) = [line for line in err.splitlines() if "the script ended" in line]
    assert "with exit code 1 after" in line and "->" in line


@pytest.mark.parametrize(("code", "advice"), [(1, True), (2, False), (4, False)])
def test_restarts_are_suggested_only_where_they_can_help(
    invitation: Invitation, code: int, advice: bool
) -> None:
    said: list[str] = []
    assert supervise(Job(python(f"raise SystemExit({code})"), invitation), said.append) == code
    assert ("--restarts N" in said[-1]) == advice


def test_a_worker_that_was_removed_gets_no_advice_to_restart(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "ACCESS_CHECK_S", 0.1)
    said: list[str] = []

    def record(line: str) -> None:
        said.append(line)
        if "is joining the run" in line:
            operator = coordinator.operator_client()
            (peer,) = {bytes.fromhex(m["peer"]) for m in coordinator.access()["enrolled"]} - before
            operator.order(RemoveWorker(peer, False, "too slow"))

    before = {bytes.fromhex(member["peer"]) for member in coordinator.access()["enrolled"]}
    with pytest.raises(JoinRefused, match=r"put out|removed"):
        supervise(Job(python("raise SystemExit(1)"), coordinator.invitation()), record)
    assert "the script ended with exit code 1" in said[-1] and "--restarts" not in said[-1]


def test_a_script_that_does_not_stop_is_ended(
    invitation: Invitation, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gridtrain worker stop` has a deadline: SIGTERM, and SIGKILL after the grace period."""
    monkeypatch.setattr(policy_enforcer, "OBEY_TIMEOUT_S", 0.2)
    said: list[str] = []

    def record(line: str) -> None:
        said.append(line)
        if "is joining the run" in line:
            threading.Timer(0.5, lambda: ask_agent(find_worker(""), {"ask": "stop"})).start()

    job = Job(python("import time; time.sleep(600)"), invitation, grace_s=5.0)
    assert supervise(job, record) == 128 + signal.SIGTERM
    assert said[-1] == "the script did not stop within 0.2 s; terminating it with SIGTERM"


def test_a_script_that_was_killed_is_reported(
    invitation: Invitation, capfd: pytest.CaptureFixture[str]
) -> None:
    supervise(Job(python("import os; os.kill(os.getpid(), 9)"), invitation))
    assert "was killed by SIGKILL" in capfd.readouterr().err


def test_the_script_finds_its_run_in_the_environment(
    invitation: Invitation, state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that `gridtrain.join` needs, and nothing that admits a worker."""
    ours = "{name: value for name, value in os.environ.items() if name.startswith('GRIDTRAIN_')}"
    code = f"import json, os; print(json.dumps({ours}))"
    job = Job(
        python(code),
        invitation,
        name="anna",
        settings={
            "advertise": "tcp://10.0.0.5:7001",
            "upload_limit": "20Mbit",
            "export_dir": str(tmp_path),
            "state_dir": str(tmp_path / "mine"),
            "checkpoint_every": "0",
        },
    )
    assert supervise(job) == 0
    found = json.loads(capfd.readouterr().out)
    assert found.pop("GRIDTRAIN_CONTROL").endswith("control.sock"), "where its owner's directives come from"
    assert found == {
        "GRIDTRAIN_COORDINATOR": invitation.address,
        "GRIDTRAIN_COORDINATOR_KEY": invitation.coordinator.hex(),
        "GRIDTRAIN_IDENTITY": str(identities(state, invitation) / "worker-0.key"),
        "GRIDTRAIN_RUN": "default",
        "GRIDTRAIN_NAME": "anna",
        "GRIDTRAIN_ADVERTISE": "tcp://10.0.0.5:7001",
        "GRIDTRAIN_UPLOAD_LIMIT": "20Mbit",
        "GRIDTRAIN_EXPORT_DIR": str(tmp_path),
        "GRIDTRAIN_STATE_DIR": str(tmp_path / "mine"),
        "GRIDTRAIN_CHECKPOINT_EVERY": "0",
        "GRIDTRAIN_CONTRIBUTION": str(identities(state, invitation) / "worker-0.now.json"),
    }


def test_a_script_begins_with_the_rate_limits_that_were_set(
    invitation: Invitation, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By `gridtrain worker set` in an earlier stay: they apply before the script has asked the agent."""
    folder = identities(state, invitation) / "worker-0"
    folder.mkdir(parents=True)
    (folder / "controls.json").write_text('{"upload": "5Mbit"}')
    shows = "import os; print(os.environ['GRIDTRAIN_UPLOAD_LIMIT'], os.environ['GRIDTRAIN_DOWNLOAD_LIMIT'])"
    assert supervise(Job(python(shows), invitation, settings={"download_limit": "50Mbit"})) == 0
    assert capfd.readouterr().out == "5Mbit 50Mbit\n"


def test_a_json_log_has_no_other_lines(invitation: Invitation, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('out'); print('one', file=sys.stderr); sys.stderr.write('two')"
    console = JsonConsole(sys.stderr)
    assert supervise(Job(python(code), invitation), console.say, console=console) == 0
    console.flush()
    captured = capfd.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert [line["fields"]["text"] for line in lines if line["event"] == "output"] == ["one", "two"]
    assert captured.out == "out\n"


def test_the_last_failure_of_a_script_is_an_error_in_a_json_log(
    invitation: Invitation, capfd: pytest.CaptureFixture[str]
) -> None:
    console = JsonConsole(sys.stderr)
    job = Job(python("exit(5)"), invitation, restarts=1, backoff_s=0.01)
    assert supervise(job, console.say, console=console) == 5
    console.flush()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (error,) = [line["fields"] for line in lines if line["level"] == "error"]
    assert lines[-1]["event"] == "error" and error["exit_code"] == 5
    assert error["text"].startswith("the script ended with exit code 5 after")


def test_a_removal_is_an_error_in_a_json_log_and_in_text_only_the_script_says_it(
    invitation: Invitation, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent_module, "ACCESS_CHECK_S", 0.0)
    monkeypatch.setattr(agent_module, "ask_coordinator", lambda entry, timeout_s: Answer(refusal="denied"))
    job = Job(python("exit(4)"), invitation)
    console = JsonConsole(sys.stderr)
    assert supervise(job, console.say, console=console) == 4
    console.flush()
    *others, last = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (last["event"], last["level"], last["fields"]["exit_code"]) == ("error", "error", 4)
    assert "was removed from the run" in last["fields"]["text"] and "removed" not in str(others)
    assert supervise(job) == 4
    assert "removed" not in capfd.readouterr().err


def test_lines_have_a_prefix_only_on_request(
    invitation: Invitation, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('one'); print('two'); print('three', file=sys.stderr)"
    assert supervise(Job(python(code), invitation, name="anna", prefix=True)) == 0
    captured = capsys.readouterr()
    assert captured.out == "[anna] one\n[anna] two\n"
    assert "[anna] three\n" in captured.err


# -- errors that are found before the script starts -------------------------------------------------


def test_a_missing_coordinator_is_reported(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    job = Job(python(f"open({str(mark)!r}, 'w')"), NO_COORDINATOR, connect_s=0.3)
    with pytest.raises(
        CoordinatorUnreachable, match=r"tcp://127\.0\.0\.1:1.*within 0\.3 s -> check that the address"
    ):
        supervise(job)
    assert not mark.exists()


@pytest.mark.parametrize(("restarts", "wait_s"), [(0, "1.5"), (1, "1.75")])
def test_a_worker_that_waits_for_its_coordinator_says_so(
    monkeypatch: pytest.MonkeyPatch, restarts: int, wait_s: str
) -> None:
    assert enrollment.SILENT_S < 2.0
    monkeypatch.setattr(enrollment, "SILENT_S", 0.05)
    told: list[str] = []
    with pytest.raises(CoordinatorUnreachable):
        job = Job(python("pass"), NO_COORDINATOR, restarts=restarts, connect_s=1.5, paused_s=1.75)
        supervise(job, told.append)
    waits = f"waiting up to {wait_s} s for the coordinator at tcp://127.0.0.1:1, which has not answered"
    assert told == [waits]


def test_an_invitation_to_another_run_is_refused(invitation: Invitation) -> None:
    with pytest.raises(JoinRefused, match='serves the run "default", not "mine" -> ask the run') as caught:
        supervise(Job(python("pass"), replace(invitation, run="mine")))
    assert caught.value.code == "wrong-run"


def test_a_finished_run_is_refused(tmp_path: Path) -> None:
    status = {"run": "default", "finished": True}
    entry = Enrollment("tcp://lab-pc:7700", bytes(32), "default", True, tmp_path / "worker-0.key", status)
    with pytest.raises(JoinRefused, match='the run "default" is finished -> ask its owner') as caught:
        check_joinable(entry)
    assert caught.value.code == "finished"


def test_an_invalid_invitation_starts_no_script(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    never = replace(coordinator.invitation(), token=b"t" * 32)
    mark = tmp_path / "started"
    with pytest.raises(
        JoinRefused, match=f"^{UNKNOWN_INVITATION} -> ask the run's owner for a new one$"
    ) as caught:
        supervise(Job(python(f"open({str(mark)!r}, 'w')"), never))
    assert caught.value.code == "invitation" and not mark.exists()


@pytest.mark.parametrize("encrypted", [True, False])
def test_different_settings_of_encryption_are_refused(state: Path, encrypted: bool) -> None:
    job = Job(python("pass"), replace(NO_COORDINATOR, encrypted=encrypted), unencrypted=encrypted)
    with pytest.raises(ConfigError, match="encrypted, but this worker was") as caught:
        supervise(job)
    assert "--unencrypted" in caught.value.remedy
    assert not state.exists(), "the run's folder is not created before the invitation is known to fit"


def test_a_program_that_does_not_exist_is_reported(invitation: Invitation) -> None:
    with pytest.raises(ConfigError, match="cannot start 'pyhton'"):
        supervise(Job(("pyhton", "train.py"), invitation))


@pytest.mark.parametrize(
    "wrong",
    [
        {"donate_limit": "much"},
        {"upload_limit": "fast"},
        {"download_limit": "0Mbit"},
    ],
    ids=str,
)
def test_a_job_that_cannot_work_is_refused_at_once(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(**{"command": ("python", "train.py"), "invitation": NO_COORDINATOR, "settings": wrong})  # type: ignore[arg-type]
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "tcp://203.0.113.9:7000"}, "cannot listen on tcp://203.0.113.9:7000: no interface of"),
        ({"export_dir": "s3://bucket/model"}, "export_dir is 's3://bucket/model'; it must be a folder"),
        ({"export_dir": "/proc/model"}, "the final model cannot be written to /proc/model: "),
    ],
    ids=str,
)
def test_what_this_machine_cannot_do_is_refused_before_the_script_starts(
    coordinator: LiveCoordinator, tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    """The invitation is not used, either."""
    before = coordinator.access()["enrolled_total"]
    started = tmp_path / "started"
    job = Job(python(f"open({str(started)!r}, 'w')"), coordinator.invitation(), settings=settings)
    with pytest.raises(GridtrainError) as caught:
        supervise(job)
    assert caught.value.reason.startswith(said) and caught.value.remedy
    assert not started.exists() and coordinator.access()["enrolled_total"] == before


def test_a_port_that_the_script_of_a_killed_worker_may_still_use_is_free_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransportError, match="the port is taken -> stop the program") as caught:
            supervise(Job(python("pass"), NO_COORDINATOR, settings={"listen": address}, grace_s=7.0))
    assert caught.value.remedy.endswith("; the script of a killed worker may use it for another 7 s")


# -- identity --------------------------------------------------------------------------------------


def test_an_admitted_machine_needs_no_further_use(
    coordinator: LiveCoordinator, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is the same worker as before; the used-up invitation still names the run."""
    once = coordinator.invitation(uses=1)
    before = coordinator.access()["enrolled_total"]
    says_its_name = "import os; print(os.environ['GRIDTRAIN_NAME'])"
    for _ in range(3):
        assert supervise(Job(python(says_its_name), once)) == 0
    names = capfd.readouterr().out.split()
    assert len(names) == 3 and len({*names}) == 1, "the run's owner sees the same name after each start"
    assert coordinator.access()["enrolled_total"] == before + 1
    assert [path.name for path in sorted(identities(state, once).glob("worker-*"))] == [
        "worker-0",
        "worker-0.key",
        "worker-0.lock",
    ]


def test_two_workers_of_one_machine_have_two_keys(
    agent: StartAgent, coordinator: LiveCoordinator, state: Path
) -> None:
    """The second one finds the first one's key in use; when the first has ended, its key is used again."""
    before = coordinator.access()["enrolled_total"]
    first, second = agent(SAYS_WHO_IT_IS), agent(SAYS_WHO_IT_IS)
    said = [process.stdout.readline().strip() for process in (first, second)]
    first.terminate()
    first.communicate(timeout=WITHIN_S)
    third = agent(SAYS_WHO_IT_IS)
    said.append(third.stdout.readline().strip())
    assert [Path(path).name for path in said] == ["worker-0.key", "worker-1.key", "worker-0.key"]
    keys = {Identity.read(Path(path)).public for path in said}
    assert len(keys) == 2 and coordinator.access()["enrolled_total"] == before + 2


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks a process up in /proc")
def test_the_script_and_the_logs_contain_no_secret(
    agent: StartAgent, coordinator: LiveCoordinator, invitation: Invitation, state: Path
) -> None:
    """Neither the token nor a secret key is visible in the script's process."""
    process = agent(SAYS_WHO_IT_IS)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    script = int(process.stdout.readline())
    seen = [Path(f"/proc/{script}/{name}").read_bytes() for name in ("environ", "cmdline")]
    assert str(path).encode() in seen[0], "the right process"
    process.terminate()
    out, err = process.communicate(timeout=WITHIN_S)
    seen += [out.encode(), err.encode(), coordinator.log.getvalue().encode()]

    worker, guest = Identity.read(path), Identity.from_secret(invitation.token)
    assert b'"enrolled"' in seen[-1] and worker.public.hex()[:12].encode() in seen[-1], "the right log"
    secrets = [invitation.text().encode(), coordinator.keys.secret, coordinator.operator.secret]
    for secret in (*secrets, worker.secret, guest.secret):
        for form in (secret, secret.hex().encode(), b64encode(secret), z85.encode(secret[:32])):
            assert not [text for text in seen if form in text]


# -- restarts --------------------------------------------------------------------------------------

FAILS_TWICE = """
import pathlib, sys
log = pathlib.Path({path!r})
log.write_text((log.read_text() if log.exists() else "") + "x")
sys.exit(0 if len(log.read_text()) == 3 else 5)
"""


@pytest.mark.parametrize(("restarts", "code", "starts"), [(0, 5, 1), (1, 5, 2), (2, 0, 3), (9, 0, 3)])
def test_a_script_that_failed_is_started_again(
    invitation: Invitation, tmp_path: Path, restarts: int, code: int, starts: int
) -> None:
    log = tmp_path / "starts"
    job = Job(python(FAILS_TWICE.format(path=str(log))), invitation, restarts=restarts, backoff_s=0.01)
    lines: list[str] = []
    assert supervise(job, lines.append) == code
    assert len(log.read_text()) == starts
    assert sum("restart" in line and " in " in line for line in lines) == starts - 1


def test_a_refused_script_is_started_again_unless_its_worker_was_removed(invitation: Invitation) -> None:
    """A single refusal proves nothing, and a worker with a stale model begins anew."""
    lines: list[str] = []
    job = Job(python("raise SystemExit(4)"), invitation, restarts=1, backoff_s=0.01)
    assert supervise(job, lines.append) == 4
    assert any(line.startswith("restart 1 of 1") for line in lines)


@pytest.mark.parametrize("code", [4, 1], ids=["refused", "refused under torchrun"])
def test_a_script_that_fails_because_the_run_has_finished_is_not_started_again(
    invitation: Invitation, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """torchrun ends with code 1, whatever the code of its processes."""
    answers = iter([False, True])  # the run finishes while the script waits for its restart; one per failure
    monkeypatch.setattr(agent_module, "ask_coordinator", lambda entry, timeout_s: Answer(next(answers)))
    lines: list[str] = []
    job = Job(python(f"raise SystemExit({code})"), invitation, restarts=100, backoff_s=0.01)
    assert supervise(job, lines.append) == code
    assert sum(line.startswith("restart ") for line in lines) == 1
    assert lines[-1].endswith('the run "default" has finished')


def test_a_finished_run_is_no_reason_to_suggest_restarts(
    invitation: Invitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "ask_coordinator", lambda entry, timeout_s: Answer(is_finished=True))
    said: list[str] = []
    assert supervise(Job(python("raise SystemExit(1)"), invitation), said.append) == 1
    assert "--restarts" not in said[-1]


COMMITS_AND_FAILS = """
import json, os, pathlib, sys
log = pathlib.Path({path!r})
starts = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (starts + 1))
if starts < {commits}:
    given = dict(step=5, steps=5, samples=20, run_samples=80, sent_bytes=5, received_bytes=7, world_size=1)
    pathlib.Path(os.environ["GRIDTRAIN_CONTRIBUTION"]).write_text(json.dumps(given))
sys.exit(5)
"""


@pytest.mark.parametrize(
    ("commits", "steady_s", "restarts"),
    [
        (0, 0.0, ["1 of 3 in 0.01 s", "2 of 3 in 0.02 s", "3 of 3 in 0.04 s"]),
        (3, 0.0, ["1 of 3 in 0.01 s"] * 3 + ["2 of 3 in 0.02 s", "3 of 3 in 0.04 s"]),
        (3, WITHIN_S, ["1 of 3 in 0.01 s", "2 of 3 in 0.02 s", "3 of 3 in 0.04 s"]),
    ],
)
def test_failures_in_a_row_are_counted_and_a_while_of_training_ends_the_row(
    invitation: Invitation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commits: int,
    steady_s: float,
    restarts: list[str],
) -> None:
    """A worker that is killed once an hour is always started again, and need not wait twice as long each
    time; one that fails after each step is not."""
    monkeypatch.setattr(agent_module, "STEADY_S", steady_s)
    code = COMMITS_AND_FAILS.format(path=str(tmp_path / "starts"), commits=commits)
    lines: list[str] = []
    assert supervise(Job(python(code), invitation, restarts=3, backoff_s=0.01), lines.append) == 5
    shown = [line.removeprefix("restart ") for line in lines if line.startswith("restart ")]
    assert shown == restarts


@pytest.mark.parametrize(("code", "is_counted"), [(3, False), (5, True)])
def test_a_script_that_failed_waits_for_its_coordinator(
    invitation: Invitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_counted: bool
) -> None:
    """It ends twice while the coordinator does not answer; with code 3, that is not its failure.

    The coordinator is asked once after each end of the script, and until it answers.
    """
    answers = iter([True, True, False, True, False, False])
    monkeypatch.setattr(
        agent_module, "ask_coordinator", lambda entry, timeout_s: Answer(is_away=next(answers))
    )
    log, lines = tmp_path / "starts", list[str]()
    script = FAILS_TWICE.format(path=str(log)).replace("else 5", f"else {code}")
    job = Job(python(script), invitation, restarts=2 if is_counted else 1, backoff_s=0.01)
    assert supervise(job, lines.append) == 0
    assert log.read_text() == "xxx" and not [*answers]
    waits = [line.partition(" once the coordinator at tcp://")[0] for line in lines if "waiting for" in line]
    assert waits == (
        ["restart 1 of 2", "restart 2 of 2"] if is_counted else 2 * ["the script will be started again"]
    )


def test_an_agent_gives_up_when_its_coordinator_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(agent_module, "_clock", itertools.count(step=20).__next__)
    lines: list[str] = []
    with LiveCoordinator() as coordinator:

        def record(line: str) -> None:
            lines.append(line)
            if "is joining the run" in line:
                coordinator.__exit__()

        script, invitation = python("raise SystemExit(3)"), coordinator.invitation()
        job = Job(script, invitation, restarts=9, backoff_s=0.01, paused_s=WITHIN_S)
        with pytest.raises(CoordinatorUnreachable, match=r"has not answered for 60 s -> ask the run's owner"):
            supervise(job, record)
    assert sum("waiting for it until" in line for line in lines) == 1


@pytest.mark.parametrize("answers, is_removed", [([False, True], False), ([False] * 9, True)])
def test_one_refused_handshake_does_not_remove_a_worker(
    invitation: Invitation, monkeypatch: pytest.MonkeyPatch, answers: list[bool], is_removed: bool
) -> None:
    """A peer on the path can refuse one; only after repeated refusals the script is not started again."""
    now_s, asked = [0.0], iter(answers)

    def ask_coordinator(entry: Enrollment, timeout_s: float) -> Answer:
        now_s[0] += 1.0
        return Answer(refusal="" if next(asked, True) else "denied")

    monkeypatch.setattr(agent_module, "ask_coordinator", ask_coordinator)
    monkeypatch.setattr(agent_module, "ACCESS_RETRY_S", 0.0)
    monkeypatch.setattr(agent_module, "_clock", lambda: now_s[0])
    lines: list[str] = []
    job = Job(python("raise SystemExit(5)"), invitation, restarts=1, backoff_s=0.01)
    if is_removed:
        with pytest.raises(JoinRefused, match="was removed from the run"):
            supervise(job, lines.append)
    else:
        assert supervise(job, lines.append) == 5
    assert any(line.startswith("restart 1 of 1") for line in lines) is not is_removed


def test_a_worker_of_another_version_is_not_started_again(
    coordinator: LiveCoordinator, invitation: Invitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator was upgraded while the script ran."""
    lines: list[str] = []

    def record(line: str) -> None:
        lines.append(line)
        if "is joining the run" in line:
            monkeypatch.setattr(zeromq_transport, "PROTOCOL_VERSION", 9)

    job = Job(python("raise SystemExit(4)"), invitation, restarts=3, backoff_s=0.01)
    assert supervise(job, record) == 4
    assert not any(line.startswith("restart") for line in lines), lines


# -- signals, against a real agent process ---------------------------------------------------------

AGENT = """
import faulthandler, json, resource, signal, sys
faulthandler.enable()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from gridtrain.core.group.invitation import parse
from gridtrain_worker import policy_enforcer
from gridtrain_worker.agent import Job, supervise
options = json.loads(sys.stdin.readline())
if options.pop("nohup", False): signal.signal(signal.SIGHUP, signal.SIG_IGN)
policy_enforcer.OBEY_TIMEOUT_S = options.pop("obey_s", policy_enforcer.OBEY_TIMEOUT_S)
sys.exit(supervise(Job(**options | {"invitation": parse(options["invitation"])})))
"""
LEAVES_GRACEFULLY = """
import signal, sys, time
def leave(number, frame):
    print("leaving on", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
time.sleep(600)
"""
SAYS_WHO_IT_IS = """
import os, time
print("ready", os.environ["GRIDTRAIN_IDENTITY"], os.getpid(), sep="\\n", flush=True)
time.sleep(600)
"""
LOSES_CTRL_C = """
import os, signal, time
signal.signal(signal.SIGINT, lambda number, frame: print("lost", flush=True))
if JOINS:
    from gridtrain.runtime.client.agent_link import AgentLink
    link = AgentLink(os.environ["GRIDTRAIN_CONTROL"], lambda: 0)
print("ready", flush=True)
while not (JOINS and link.directive.stop): time.sleep(0.02)
print("stopped after its step", flush=True)
"""
IGNORES_SIGNALS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(600)
"""
TAKES_ITS_TIME = """
import signal, sys, time
def leave(number, frame):
    with open(SENSORS, "w") as file:
        file.write('{"on_battery": false}')
    print("plugged in again", flush=True)
    open(GATE).read()
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True: time.sleep(600)
"""
LEAVES_A_CHILD = """
import subprocess, sys
code = "print('up', flush=True); import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
"""
IGNORES = """
import signal
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
"""
STARTS_A_SESSION = """
import os, time
read, write = os.pipe()
if os.fork() == 0:  # in a session of its own, as the processes of torchrun
    os.setsid()
    if ORPHAN and os.fork(): os._exit(0)
    os.write(write, str(os.getpid()).encode())
    time.sleep(600)
child = os.read(read, 10).decode()
if ORPHAN: os.wait()
"""
PASSES_SIGTERM_ON = """
import os, signal, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
read, write = os.pipe()
if (child := os.fork()) == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(0)))
    os.write(write, b"1")
    while True: time.sleep(600)
os.read(read, 1)
signal.signal(signal.SIGTERM, lambda *_: (os.kill(child, signal.SIGTERM), os.waitpid(child, 0), os._exit(0)))
print("ready", child, sep="\\n", flush=True)
while True: time.sleep(600)
"""
SAYS_WHAT_IT_STARTED = 'print("ready", child, sep="\\n", flush=True)\n'
LEAVES_AN_ORPHAN_THAT_ENDS = """
import os, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.write(write, str(os.getpid()).encode())
    os._exit(0)
os.wait()
orphan = f"/proc/{os.read(read, 10).decode()}"
until_s = time.monotonic() + 30
while os.path.exists(orphan) and time.monotonic() < until_s: time.sleep(0.02)
print("ready", os.path.exists(orphan), sep="\\n", flush=True)
"""


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")


def in_sessions(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test with `script`, which has started a child in a new session, or one that lost its parent."""
    scripts = [STARTS_A_SESSION.replace("ORPHAN", one) for one in ("False", "True")]
    return needs_proc(pytest.mark.parametrize("script", scripts, ids=["child", "orphan"])(test))


@pytest.fixture
def agent(invitation: Invitation, tmp_path: Path) -> Iterator[StartAgent]:
    """Start an agent; return when its script has printed "ready".  A failed test shows the agents' output."""
    started: list[subprocess.Popen[str]] = []
    program = tmp_path / "agent.py"
    program.write_text(AGENT)

    def start(code: str, **options: object) -> subprocess.Popen[str]:
        job = {"command": python(code), "invitation": invitation.text(), **options}
        process = subprocess.Popen(
            (sys.executable, str(program)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)  # if the test has failed, this shows what its threads did
        _, err = process.communicate(timeout=WITHIN_S)
        print(f"agent {process.pid} ended with {process.returncode}:\n{err}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_lets_the_script_leave_gracefully(agent: StartAgent, number: signal.Signals) -> None:
    process = agent(LEAVES_GRACEFULLY)
    process.send_signal(number)
    out, err = process.communicate(timeout=WITHIN_S)
    assert out == f"leaving on {number.name}\n"
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err


def test_a_closed_terminal_lets_the_script_leave_gracefully(agent: StartAgent) -> None:
    """Kernel and shell both send SIGHUP: the second is not a second wish of the user, which would kill."""
    process = agent(LEAVES_GRACEFULLY)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=WITHIN_S)
    assert out == "leaving on SIGTERM\n"
    assert process.returncode == 128 + signal.SIGHUP and "stopped by SIGHUP" in err


@pytest.mark.parametrize(
    ("numbers", "first", "count"),
    [
        ([signal.SIGHUP, signal.SIGHUP, signal.SIGTERM], signal.SIGTERM, 1),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGTERM], signal.SIGTERM, 2),
        ([signal.SIGINT, signal.SIGHUP], signal.SIGINT, 1),
        ([signal.SIGINT, signal.SIGINT], signal.SIGINT, 2),
    ],
)
def test_the_end_of_a_session_is_one_request(numbers: list[int], first: int, count: int) -> None:
    """Kernel and shell send SIGHUP, and logind SIGTERM; a second request would kill the script."""
    with agent_module.SignalWatcher() as signals:
        for number in numbers:
            signal.raise_signal(number)
    assert (signals.first, signals.count) == (first, count)


def test_an_agent_under_nohup_outlives_its_terminal(agent: StartAgent) -> None:
    process = agent(LEAVES_GRACEFULLY, nohup=True)
    process.send_signal(signal.SIGHUP)
    process.terminate()
    out, _ = process.communicate(timeout=WITHIN_S)
    assert (out, process.returncode) == ("leaving on SIGTERM\n", 128 + signal.SIGTERM)


@pytest.mark.parametrize("joins", [False, True], ids=["before join", "after join"])
def test_a_script_that_loses_ctrl_c_ends_nevertheless(agent: StartAgent, joins: bool) -> None:
    """An import of C code, such as that of numpy by torch, may drop the KeyboardInterrupt."""
    process = agent(LOSES_CTRL_C.replace("JOINS", str(joins)), grace_s=10 * WITHIN_S)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WITHIN_S)
    assert out == ("lost\nstopped after its step\n" if joins else "lost\n")
    assert process.returncode == 128 + signal.SIGINT and "stopped by SIGINT" in err


def test_a_script_that_ignores_the_signal_is_killed_after_its_grace(agent: StartAgent) -> None:
    process = agent(IGNORES_SIGNALS, grace_s=0.3)
    process.terminate()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM


STOPS = pytest.mark.parametrize("stop", [signal.SIGTSTP, signal.SIGSTOP], ids=lambda number: number.name)


@needs_proc
@STOPS
def test_a_stopped_agent_stops_the_script_too(agent: StartAgent, stop: signal.Signals) -> None:
    """The script is in its own process group, which the terminal does not stop after Ctrl-Z."""
    process = agent(SAYS_WHO_IT_IS)
    assert process.stdout is not None
    stop_and_continue(process, [process.stdout.readline() for _ in range(2)][1].strip(), stop)


@in_sessions
@STOPS
def test_a_stopped_agent_stops_what_the_script_has_started_in_another_session(
    agent: StartAgent, script: str, stop: signal.Signals
) -> None:
    process = agent(script + SAYS_WHAT_IT_STARTED + "time.sleep(600)")
    assert process.stdout is not None
    stop_and_continue(process, process.stdout.readline().strip(), stop)


def state_of(pid: object) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def stop_and_continue(process: subprocess.Popen[str], script: str, stop: signal.Signals) -> None:
    def both(wanted: str) -> bool:
        return state_of(process.pid) in wanted and state_of(script) in wanted

    process.send_signal(stop)
    until(lambda: both("T"))
    process.send_signal(signal.SIGCONT)
    until(lambda: both("RS"))
    process.terminate()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM


def until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < until_s
        threading.Event().wait(0.02)


def test_a_second_signal_kills_at_once(agent: StartAgent) -> None:
    process = agent(IGNORES_SIGNALS, grace_s=60)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM), (
        "the signal that was handled first"
    )


def test_no_restart_after_a_signal(agent: StartAgent) -> None:
    process = agent(LEAVES_GRACEFULLY.replace("sys.exit(0)", "sys.exit(3)"), restarts=5)
    process.terminate()
    out, _ = process.communicate(timeout=WITHIN_S)
    assert (out, process.returncode) == ("leaving on SIGTERM\n", 128 + signal.SIGTERM)


def test_processes_that_a_script_leaves_running_are_ended(agent: StartAgent) -> None:
    """The script ends; its child, which would sleep for ten minutes, holds stderr open until it ends, too."""
    process = agent(LEAVES_A_CHILD)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0


@in_sessions
def test_processes_in_other_sessions_end_with_the_script(agent: StartAgent, script: str) -> None:
    process = agent(script + SAYS_WHAT_IT_STARTED)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0


@in_sessions
@pytest.mark.parametrize("signals", [1, 2])
def test_processes_in_other_sessions_are_killed_with_the_script(
    agent: StartAgent, signals: int, script: str
) -> None:
    """After the grace period, or on the second signal."""
    process = agent(
        f"{IGNORES}{script}{SAYS_WHAT_IT_STARTED}time.sleep(600)", grace_s=0.3 if signals == 1 else 600
    )
    for number in (signal.SIGTERM, signal.SIGINT)[:signals]:
        process.send_signal(number)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT), "the one handled first"


@needs_proc
def test_an_orphan_that_has_ended_is_reaped(agent: StartAgent) -> None:
    """By the agent, which has adopted it, long before the script ends."""
    process = agent(LEAVES_AN_ORPHAN_THAT_ENDS)
    assert process.stdout is not None and process.stdout.readline() == "False\n"


def test_other_children_of_the_agents_process_are_not_ended_or_reaped(invitation: Invitation) -> None:
    with (
        subprocess.Popen(("/bin/cat",), stdin=PIPE, stdout=PIPE, start_new_session=True) as other,
        subprocess.Popen(("/bin/sh", "-c", "exit 7"), start_new_session=True) as ended,
    ):
        assert supervise(Job(python("pass"), invitation)) == 0
        assert other.communicate(b"still there", timeout=WITHIN_S)[0] == b"still there"
    assert (other.returncode, ended.returncode) == (0, 7)


STARTS_A_SERVICE_AND_ENDS = """
import subprocess
input()
print(subprocess.Popen(("/bin/cat",), start_new_session=True).pid, flush=True)
"""
TELLS_IT_TO = """
import os, select
open({pipe!r}, "w").write("go\\n")
assert select.select([os.pidfd_open({pid})], [], [], {within_s})[0], "it has not ended"
"""


@needs_proc
def test_a_service_of_another_program_that_the_agent_adopts_is_not_ended(
    invitation: Invitation, tmp_path: Path
) -> None:
    """The program ends before the script, so that the agent becomes the parent of its service."""
    os.mkfifo(pipe := tmp_path / "pipe")
    go = os.open(pipe, os.O_RDWR)
    with subprocess.Popen(python(STARTS_A_SERVICE_AND_ENDS), stdin=go, stdout=PIPE) as other:
        tells = TELLS_IT_TO.format(pipe=str(pipe), pid=other.pid, within_s=WITHIN_S)
        assert supervise(Job(python(tells), invitation)) == 0
        assert other.stdout is not None
        service = int(other.stdout.readline())
        os.write(go, b"still there\n")
        assert other.stdout.readline() == b"still there\n"
        os.kill(service, signal.SIGTERM)
        os.waitpid(service, 0)
    os.close(go)


@needs_proc
def test_a_process_with_the_id_of_one_that_has_ended_gets_no_signal() -> None:
    other = subprocess.Popen(("/bin/cat",), stdin=subprocess.PIPE)
    ((pid, start),) = [one for one in script_processes.read_processes() if one[0] == other.pid]
    script_processes.send([(pid, start - 1)], signal.SIGKILL)
    other.communicate(timeout=WITHIN_S)
    assert other.returncode == 0, "it ended as its input did"


def test_a_script_that_was_ended_as_it_did_not_pause_is_started_again(
    agent: StartAgent, tmp_path: Path
) -> None:
    """Also if the reason for the pause ends while the script is still ending: no restart is used up."""
    feel, gate = tmp_path / "sensors.json", tmp_path / "gate"
    feel.write_text('{"on_battery": false}')
    os.mkfifo(gate)
    ends = TAKES_ITS_TIME.replace("SENSORS", repr(str(feel))).replace("GATE", repr(str(gate)))
    process = agent(ends, sensors=str(feel), controls=[["battery", "pause"]], obey_s=0.1)
    feel.write_text('{"on_battery": true}')
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "plugged in again\n"
    assert any("training is allowed again" in line for line in process.stderr)
    gate.write_text("")  # from here on the script ends
    assert any("the script has ended; it will be started again now" in line for line in process.stderr)
    assert process.stdout.readline() == "ready\n", "the second script"
    process.terminate()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("code", [LEAVES_GRACEFULLY, IGNORES_SIGNALS], ids=["graceful", "ignores signals"])
def test_a_killed_agent_leaves_no_orphan(agent: StartAgent, code: str) -> None:
    process = agent(code, grace_s=1)
    os.kill(process.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=WITHIN_S)  # ends when the script has ended
    assert out == ("leaving on SIGTERM\n" if code is LEAVES_GRACEFULLY else "")
    assert process.returncode == -signal.SIGKILL


@needs_proc
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_agent_leaves_no_orphan_in_another_session(agent: StartAgent, is_stopped: bool) -> None:
    script = STARTS_A_SESSION.replace("ORPHAN", "False")
    process = agent(f"{IGNORES}{script}{SAYS_WHAT_IT_STARTED}time.sleep(600)", grace_s=1)
    if is_stopped:
        assert process.stdout is not None
        started = process.stdout.readline().strip()
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(started) == "T")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == -signal.SIGKILL


@needs_proc
def test_what_a_stopped_and_killed_agent_leaves_can_end_in_order(agent: StartAgent) -> None:
    process = agent(PASSES_SIGTERM_ON, grace_s=600)
    assert process.stdout is not None
    started = process.stdout.readline().strip()
    process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(started) == "T")
    os.kill(process.pid, signal.SIGKILL)
    assert process.communicate(timeout=WITHIN_S)[0] == "saved\n"


def watchdog_command(mark: str) -> list[str]:
    return [sys.executable, "-I", "-S", watchdog_program.__file__, "60", mark]


def started_with(mark: str) -> subprocess.Popen[str]:
    """Start a script with an agent's mark, but without an agent; return when it is ready."""
    command, variables = (sys.executable, "-c", LEAVES_GRACEFULLY), os.environ | dict([mark.split("=")])
    script = subprocess.Popen(command, env=variables, stdout=PIPE, text=True, process_group=0)
    assert script.stdout is not None and script.stdout.readline() == "ready\n"
    return script


STARTS_A_WATCHDOG = """
import subprocess, sys, time
watchdog = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print("ready", flush=True)
watchdog.stdin.write(sys.stdin.readline().encode())
watchdog.stdin.flush()
time.sleep(600)
"""


@needs_proc
def test_a_script_whose_agent_is_stopped_as_it_starts_is_stopped_too() -> None:
    """The agent tells the watchdog the script's process id only after it has been continued."""
    mark = f"{CONTROL_VARIABLE}=/{os.getpid()}/stopped"
    starts_it = (sys.executable, "-c", STARTS_A_WATCHDOG, *watchdog_command(mark))
    with (
        started_with(mark) as script,
        subprocess.Popen(starts_it, stdin=PIPE, stdout=PIPE, text=True) as agent,
    ):
        try:
            assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
            agent.send_signal(signal.SIGSTOP)
            until(lambda: state_of(script.pid) == "T")
            agent.send_signal(signal.SIGCONT)
            assert agent.stdin is not None
            agent.stdin.write(f"{script.pid}\n")
            agent.stdin.flush()
            until(lambda: state_of(script.pid) in "RS")
            agent.kill()
            assert script.communicate(timeout=WITHIN_S)[0] == "leaving on SIGTERM\n"
        finally:
            agent.kill()
            script.kill()


@needs_proc
def test_a_script_whose_agent_was_killed_as_it_started_is_no_orphan() -> None:
    """The agent has not told the watchdog the script's process id."""
    mark = f"{CONTROL_VARIABLE}=/{os.getpid()}/control"
    script = started_with(mark)
    with subprocess.Popen(watchdog_command(mark), stdin=subprocess.DEVNULL) as watchdog:
        try:
            assert script.communicate(timeout=WITHIN_S)[0] == "leaving on SIGTERM\n"
            assert script.returncode == 0 and watchdog.wait(WITHIN_S) == 0
        finally:
            script.kill()
            watchdog.kill()
