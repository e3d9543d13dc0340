"""A new user's first mistakes, with real means: scripts in processes, sockets on loopback.

Asserted is the last line: it says what happened and, after the arrow, what to do.  Mistakes on the command
line are in tests/cli, those of the agent in tests/worker.
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from live_coordinator import LiveCoordinator

import gridtrain
from gridtrain.config import Deadlines, JoinConfig
from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import Join, PeerId
from gridtrain.errors import (
    ConfigError,
    CoordinatorUnreachable,
    JoinRefused,
    TransportError,
)
from gridtrain.extras import install_command
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.stack import build_stack
from gridtrain.network.transport.zmq import zeromq_transport
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.runtime import io_loop
from gridtrain.runtime.client.agent_link import CONTROL_VARIABLE
from gridtrain.runtime.client.enrollment import UNKNOWN_INVITATION, present_invitation
from gridtrain.sdk import join as join_module
from gridtrain.sdk.grid import Grid

pytestmark = pytest.mark.integration
WITHIN_S = 60.0
SHORT = Deadlines(connect_s=0.5)
SOFTWARE = "gridtrain test"
StartCoordinator = Callable[..., LiveCoordinator]


@pytest.fixture
def start_coordinator() -> Iterator[StartCoordinator]:
    """Starts coordinators that serve until the end of the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(LiveCoordinator(**options))


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")}
    return ours | more


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, env=environment(**more), check=False
    )


def config_of(address: str, key: PeerId, **options: str) -> JoinConfig:
    given = {"coordinator": address, "coordinator_key": key.hex(), "identity": "in memory", "name": "anna"}
    return JoinConfig.from_environment({}, **given | options)


def grid_of(config: JoinConfig, identity: Identity, kind: type[ZeroMQTransport] = ZeroMQTransport) -> Grid:
    acquaintances = PeerAllowlist(bytes.fromhex(config.coordinator_key))
    return Grid(build_stack(kind(identity, SOFTWARE, gate=acquaintances), identity), config, acquaintances)


def join(address: str, invited: Invitation | None = None, **options: str) -> Grid:
    """As `gridtrain.join` does once a key is admitted; with less patience where no peer is to answer."""
    identity = Identity.generate()
    if invited is None:
        config = replace(config_of(address, bytes(32), **options), deadlines=SHORT)
    else:
        present_invitation(invited, identity.public, WITHIN_S)
        config = config_of(address, invited.coordinator, **options)
    return grid_of(config, identity)


# -- the invitation ----------------------------------------------------------------------------------------


CHILD = """\
import multiprocessing
import sys
import gridtrain

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=print)
    child.start()
    child.join()
    sys.exit(child.exitcode == 0)
gridtrain.join()
"""


def test_a_script_with_neither_agent_nor_invitation_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import gridtrain; gridtrain.join()")
    done = run(sys.executable, str(script))
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "gridtrain: train.py, line 1: ConfigError: no invitation was given, so gridtrain cannot tell which "
        "run to join -> start the script with `gridtrain worker INVITATION -- python train.py`, or pass the "
        'invitation: gridtrain.join("gridtrain1:...")'
    )


@pytest.mark.executed
def test_an_invalid_option_is_reported_with_the_line_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import gridtrain\n\ngridtrain.GTopK(density=5)")
    done = run(sys.executable, str(script), GRIDTRAIN_COORDINATOR="tcp://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("gridtrain: train.py, line 3: ConfigError: density is 5")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_process_that_imports_the_script_does_not_join(method: str, tmp_path: Path) -> None:
    """It would replace its parent in the run."""
    script = tmp_path / "train.py"
    script.write_text(CHILD)
    done = run(sys.executable, str(script), method)
    assert done.returncode == 0, done.stderr
    assert "ConfigError: gridtrain.join() was called while a child process, such as" in done.stderr
    assert 'call it under `if __name__ == "__main__":`' in done.stderr


def test_a_malformed_coordinator_key_is_refused() -> None:
    place = {"coordinator": "tcp://10.0.0.5:7700", "identity": "worker-0.key"}
    with pytest.raises(ConfigError, match="the coordinator's key is '0a1b'; it must be 64 hex digits"):
        JoinConfig.from_environment({}, coordinator_key="0a1b", **place)


@pytest.mark.parametrize("text", ["tcp://10.0.0.5:7700", "10.0.0.5", "", "a b"])
def test_a_text_that_is_no_invitation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gridtrain.join(text)
    other = f"{text.replace(' ', '')!r} is not an invitation; an invitation begins with gridtrain1:"
    assert str(caught.value) == (
        f"{other if text else 'no invitation was given'} -> copy the whole line that the run's owner gave you"
        + ("" if text else "; if a command was meant to print the invitation, read what it printed")
    )


def test_a_truncated_invitation_is_refused() -> None:
    text = Invitation("tcp://10.0.0.5:7700", bytes(32), bytes(32), "default").text()
    with pytest.raises(ConfigError, match=r"was cut short or altered in transit -> copy the whole line"):
        gridtrain.join(text[:-5])


def test_an_invitation_wrapped_by_a_mail_program_is_accepted(start_coordinator: StartCoordinator) -> None:
    text = start_coordinator().invitation().text()
    with gridtrain.join(f" <{text[:60]}\n{text[60:]}>") as grid:
        assert grid.step == 0


@pytest.mark.parametrize(
    ("code", "has_agent", "exit_code"), [("finished", True, 0), ("finished", False, 4), ("kicked", True, 4)]
)
def test_a_run_that_ends_while_the_agents_script_starts_is_no_failure(
    start_coordinator: StartCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    has_agent: bool,
    exit_code: int,
) -> None:
    """The agent has checked that the run is not finished."""

    def refuse(transport: FlowControlTransport, *_: object) -> None:
        transport.close()  # as a grid does
        raise JoinRefused(code, "refused")

    monkeypatch.setattr(join_module, "Grid", refuse)
    if has_agent:
        monkeypatch.setenv(CONTROL_VARIABLE, "nowhere")
    with pytest.raises(JoinRefused, match="refused") as caught:
        gridtrain.join(start_coordinator().invitation().text())
    assert caught.value.exit_code == exit_code


def test_an_invitation_admits_the_same_worker_again(start_coordinator: StartCoordinator, state: Path) -> None:
    """With one use: the machine's key is known from then on, and one grid at a time uses it."""
    text = start_coordinator().invitation(uses=1).text()
    for _ in range(2):
        gridtrain.join(text).close()
    assert [key.name for key in state.rglob("*.key")] == ["worker-0.key"]
    with gridtrain.join(text), pytest.raises(JoinRefused, match="this invitation has no uses left") as caught:
        gridtrain.join(text)
    assert caught.value.code == "invitation"
    assert len(list(state.rglob("*.key"))) == 1, "the refused worker has left no key"


def test_a_thread_that_joins_while_it_holds_a_grid_of_the_run_is_warned(
    start_coordinator: StartCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """As a notebook whose cells are run again; two threads may each hold a grid."""
    warning = 'this script still holds the worker anna of the run "default", for which the new one will wait'
    text = start_coordinator().invitation(uses=3).text()
    with gridtrain.join(text, name="anna") as grid:
        other = threading.Thread(target=lambda: gridtrain.join(text, name="bert").close())
        other.start()
        other.join(WITHIN_S)
        assert not other.is_alive() and warning not in caplog.text
        gridtrain.join(text).close()
        assert caplog.text.count(warning) == 1 and "call grid.close() before gridtrain.join()" in caplog.text
        grid.close()
        gridtrain.join(text).close()
    assert caplog.text.count(warning) == 1


def test_an_invitation_of_another_coordinator_is_refused(start_coordinator: StartCoordinator) -> None:
    """Its key does not answer at that address: no program there can impersonate it."""
    foreign = replace(start_coordinator().invitation(), coordinator=Identity.generate().public)
    with pytest.raises(CoordinatorUnreachable, match=f"a program listens on {foreign.address}, but"):
        present_invitation(foreign, Identity.generate().public, 1.0)


def test_an_unknown_token_is_refused(start_coordinator: StartCoordinator) -> None:
    forged = replace(start_coordinator().invitation(), token=b"t" * 32)
    with pytest.raises(JoinRefused) as caught:
        gridtrain.join(forged.text())
    assert str(caught.value) == f"{UNKNOWN_INVITATION} -> ask the run's owner for a new one"


def test_an_unencrypted_run_is_joined_only_on_request() -> None:
    clear = Invitation("tcp://127.0.0.1:1", bytes(32), bytes(32), "default", encrypted=False)
    with pytest.raises(ConfigError, match=r'"default" is not encrypted, .* -> ask its owner for'):
        gridtrain.join(clear.text())
    encrypted = replace(clear, encrypted=True)
    with pytest.raises(ConfigError, match=r'"default" is encrypted, .* -> omit --unencrypted'):
        gridtrain.join(encrypted.text(), unencrypted=True)


def test_a_key_file_that_others_may_read_is_refused(start_coordinator: StartCoordinator, state: Path) -> None:
    text = start_coordinator().invitation().text()
    gridtrain.join(text).close()
    (path,) = state.rglob("*.key")
    path.chmod(0o644)
    with pytest.raises(ConfigError) as caught:
        gridtrain.join(text)
    assert caught.value.reason == f"the key file {path} has mode 0644, so others may read it"
    assert f"chmod 600 {path}" in caught.value.remedy


def test_a_name_that_is_too_long_is_refused(start_coordinator: StartCoordinator) -> None:
    with pytest.raises(ConfigError, match=r"^the name of .* is 65 bytes, .* must be at most 64 bytes"):
        gridtrain.join(start_coordinator().invitation().text(), name="x" * 65)


# -- the address -------------------------------------------------------------------------------------------


def test_without_an_agent_a_worker_listens_on_the_interface_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(ZeroMQTransport):
        def listen(self, address: str) -> str:
            raise TransportError(f"asked to listen at {address}")

    monkeypatch.setattr(
        io_loop, "default_listen_address", lambda coordinator: f"the interface to {coordinator}"
    )
    for options, expected in (
        ({}, "the interface to tcp://10.0.0.9:7700"),
        ({"listen": "tcp://*:7701"}, "tcp://.:7701"),
    ):
        config = config_of("tcp://10.0.0.9:7700", bytes(32), **options)
        with pytest.raises(TransportError, match=f"^asked to listen at {expected}$"):
            grid_of(config, Identity.generate(), Refusing)


@pytest.mark.parametrize(
    ("options", "moved"),
    [({}, True), ({"listen": "tcp://127.0.0.1:0"}, False)],
    ids=["any address", "a chosen address"],
)
def test_a_worker_announces_the_address_that_it_has_when_it_reconnects(
    start_coordinator: StartCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    moved: bool,
) -> None:
    """Its machine gets the address 127.0.0.2, as by a change of the network, and its first address again."""
    service = start_coordinator()
    with join(service.address, service.invitation(), **options) as grid:
        loop = grid._session.connection.loop
        transport, announced = loop._transport, queue.Queue[str]()
        send = transport.send

        def seen(peer: PeerId, message: Any, *frames: Any) -> None:
            if isinstance(message, Join):
                announced.put(message.address)
            send(peer, message, *frames)

        def reconnect() -> None:
            transport.hang_up(service.keys.public)
            transport.dial(service.keys.public, service.address)

        monkeypatch.setattr(transport, "send", seen)
        addresses = []
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
            own = f"tcp://{host}:0"
            monkeypatch.setattr(io_loop, "interface_address", {"127.0.0.1": own}.__getitem__)
            loop.mailbox.submit(reconnect)
            addresses.append(urlsplit(announced.get(timeout=WITHIN_S)))
            socket.create_connection((addresses[-1].hostname, addresses[-1].port)).close()
    first, second, third = addresses
    assert second.hostname == ("127.0.0.2" if moved else "127.0.0.1")
    assert third == first


def test_a_coordinator_that_does_not_run_is_reported() -> None:
    with pytest.raises(CoordinatorUnreachable) as caught:
        join("tcp://127.0.0.1:1")
    assert "no coordinator answered at tcp://127.0.0.1:1 within " in caught.value.reason
    assert caught.value.remedy == (
        "check the address and the port, and that `gridtrain coordinator` is running there"
    )


def test_a_coordinators_name_that_cannot_be_resolved_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(CoordinatorUnreachable, match=r"'owner.invalid' cannot be resolved .* server \(DNS\)"):
        join("tcp://owner.invalid:7700")


def test_another_program_at_the_address_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CoordinatorUnreachable, match=f"no coordinator answered at {address} within"):
            join(address)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        (
            "taken",
            "the port is taken -> stop the program that uses the port, choose another port, or use port 0",
        ),
        ("tcp://192.0.2.1:0", "no interface of this machine has that address -> listen on"),
        ("7701", '-> use an address such as "tcp://0.0.0.0:7000"; port 0 stands for any free port'),
    ],
)
def test_an_unusable_listen_address_is_reported(
    start_coordinator: StartCoordinator, listen: str, expected: str
) -> None:
    """A second try with port 0 works in the same process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = start_coordinator().invitation().text()
        place = f"tcp://127.0.0.1:{server.getsockname()[1]}" if listen == "taken" else listen
        with pytest.raises(TransportError, match=f"^cannot listen on .*{expected}"):
            gridtrain.join(text, listen=place)
        gridtrain.join(text, listen="tcp://127.0.0.1:0").close()


# -- the run -----------------------------------------------------------------------------------------


def test_the_coordinator_of_another_run_is_reported(start_coordinator: StartCoordinator) -> None:
    service = start_coordinator()
    with pytest.raises(JoinRefused) as caught:
        join(service.address, service.invitation(), run="mine")
    assert caught.value.code == "wrong-run"
    assert str(caught.value) == (
        'this coordinator serves the run "default", not "mine" -> '
        'ask the owner of "mine" for an invitation to it'
    )


def test_an_unknown_key_is_denied_access(start_coordinator: StartCoordinator) -> None:
    """A key that never presented an invitation; the coordinator does not even greet it."""
    service = start_coordinator()
    with pytest.raises(JoinRefused, match=r"denies this worker access -> ask the run's owner") as caught:
        grid_of(config_of(service.address, service.keys.public), Identity.generate())
    assert caught.value.code == "denied"


def test_another_protocol_version_is_refused(
    start_coordinator: StartCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator greets with protocol 9; the worker has another version."""
    with monkeypatch.context() as patch:
        patch.setattr(zeromq_transport, "PROTOCOL_VERSION", 9)
        text = start_coordinator().invitation().text()
    expected = (
        r"version 9, but this software uses version 6 .* -> install the same version of gridtrain on both"
    )
    with pytest.raises(JoinRefused, match=expected) as caught:
        gridtrain.join(text)
    assert caught.value.code == "version"


# -- torch -------------------------------------------------------------------------------------------


@pytest.fixture
def without(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Environment of a Python that lacks a package: in `sys.modules`, None means "cannot be imported"."""

    def hide(package: str) -> dict[str, str]:
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None\n")
        here = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
        return {"PYTHONPATH": here}

    return hide


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_a_missing_package_of_the_extra_is_reported(
    without: Callable[[str], dict[str, str]], package: str
) -> None:
    done = run(sys.executable, "-c", "import gridtrain; gridtrain.join()", **without(package))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"gridtrain.errors.ConfigError: gridtrain.join needs {package} to be installed -> "
        f"{install_command('torch')} (or install the torch build that fits your GPU first)"
    )


def test_the_demo_reports_that_torch_is_missing(
    without: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    """Reported before four processes fail one by one; no traceback."""
    out = tmp_path / "results"
    done = run(sys.executable, "-m", "gridtrain", "demo", "--out", str(out), **without("torch"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gridtrain: gridtrain demo needs torch to be installed -> pip install")
    assert not out.exists()


def test_a_coordinator_needs_no_torch(without: Callable[[str], dict[str, str]]) -> None:
    done = run(sys.executable, "-m", "gridtrain", "coordinator", "--help", **without("torch"))
    assert done.returncode == 0


# -- a training script that raises -----------------------------------------------------------------------

SCRIPT = """
import sys, torch, gridtrain
torch.set_num_threads(1)
how, *said = sys.argv[1:]  # `said`, if given: a FIFO, opened when step 3 was made and printed
data = [(torch.tensor([float(i)]), torch.tensor([2.0 * i])) for i in range(8)]
grid = gridtrain.join()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.Dense())
for inputs, targets in grid.batches(data, batch_size=1, steps=6):
    if grid.step == 3 and how == "raises":
        open(*said).read()
        raise ValueError("no such column")
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
    print(f"step {grid.step} of a group of {grid.world_size}")
    if grid.step == 3 and how == "works" and said:
        open(*said, "w").close()
"""


def test_a_script_that_raises_ends_with_its_traceback(
    start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    """Its traceback and one line of the agent; exit code 1.  The other worker goes on to the end."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    os.mkfifo(tmp_path / "said")
    invitation = start_coordinator(min_workers=2).invitation(uses=2).text()

    def agent(name: str, how: str) -> subprocess.Popen[str]:
        options = ("--name", name, "--export-dir", str(tmp_path / name))
        command = (sys.executable, "-u", str(script), how, str(tmp_path / "said"))
        return subprocess.Popen(
            (sys.executable, "-m", "gridtrain", "worker", invitation, *options, "--", *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    agents = [agent("anna", "works"), agent("berta", "raises")]
    try:
        (out, err), (raised_out, raised_err) = (one.communicate(timeout=WITHIN_S) for one in agents)
    finally:
        for one in agents:
            one.kill()

    assert agents[1].returncode == 1
    assert raised_out.splitlines() == [f"step {step} of a group of 2" for step in (1, 2, 3)]
    shown = [line for line in raised_err.splitlines() if '"event": "contribution"' not in line]
    *_, traceback_end, agents_line, contributed = shown
    assert (fields := json.loads(contributed)["fields"])["steps"] == 3 and 0 < fields["share"] < 1
    agents_line = json.loads(agents_line)["fields"]["text"]
    assert json.loads(traceback_end)["fields"]["text"] == "ValueError: no such column"
    assert agents_line.startswith("the script ended with exit code 1 after ")
    # The other worker may already have reached the end of the run.
    rest = r'if it may succeed next time, --restarts N starts it again|the run "default" has finished'
    assert re.search(f"above; ({rest})$", agents_line), agents_line

    assert agents[0].returncode == 0, err
    assert out.splitlines() == [f"step {step} of a group of {2 if step <= 3 else 1}" for step in range(1, 7)]
    assert "Traceback" not in err
    assert (tmp_path / "anna" / "final.safetensors").exists()


def test_a_refused_script_ends_with_one_sentence(start_coordinator: StartCoordinator, tmp_path: Path) -> None:
    """A mistake in the script's own calls ends in one sentence, too, with and without an agent."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("steps=6", "steps=6, epochs=1"))
    invitation = start_coordinator().invitation().text()
    agent = (sys.executable, "-m", "gridtrain", "worker", invitation, "--")
    done = run(*agent, sys.executable, str(script), "works")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    *_, sentence, agents_line = done.stderr.splitlines()
    agents_line = json.loads(agents_line)["fields"]["text"]
    assert json.loads(sentence)["fields"]["text"] == (
        "gridtrain: train.py, line 10: ConfigError: epochs is 1 and steps is 6; exactly one of "
        "them must be given -> pass either epochs= or steps= to grid.batches"
    )
    assert agents_line.startswith("the script ended with exit code 2 after ")


def test_a_script_without_an_agent_trains_with_its_invitation(
    start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    join_with = "join(sys.stdin.read(), export_dir='out')"
    script.write_text(SCRIPT.replace("join()", join_with))
    done = subprocess.run(
        (sys.executable, str(script), "works"),
        input=start_coordinator().invitation().text(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {step} of a group of 1" for step in range(1, 7)]
    assert (tmp_path / "out" / "final.safetensors").exists()
