"""A newcomer's first mistakes, made as a newcomer makes them: scripts in processes, sockets on loopback.

What is asserted is what they read last: one line that says what happened and, after the arrow, what to do.
The command line's own mistakes are in tests/cli, the agent's in tests/worker.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import gridtrain
from gridtrain.config import Deadlines, JoinConfig
from gridtrain.errors import (
    ConfigError,
    CoordinatorUnreachable,
    GridtrainError,
    JoinRefused,
    TransportError,
)
from gridtrain.optim import grid as grid_module
from gridtrain.optim.grid import Grid
from gridtrain.transport import zeromq
from gridtrain.transport.zeromq import ZeroMQTransport
from gridtrain_coordinator.daemon import Coordinator
from gridtrain_coordinator.store import Store

pytestmark = pytest.mark.integration
WITHIN_S = 60.0
IMPATIENT = Deadlines(connect_s=0.5)


@pytest.fixture
def start_coordinator() -> Iterator[Callable[..., str]]:
    """Serves the run "default" until the end of the test; returns its address."""
    stop, threads = threading.Event(), []

    def start(*, min_workers: int = 1) -> str:
        transport = ZeroMQTransport(secrets.token_bytes(32), "gridtrain test")
        address = transport.listen("tcp://127.0.0.1:0")
        daemon = Coordinator.of_run(
            transport, Store.open(":memory:"), min_workers=min_workers, address=address
        )
        threads.append(threading.Thread(target=daemon.run, args=(stop,)))
        threads[-1].start()
        return address

    yield start
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")}
    return ours | more


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, env=environment(**more), check=False
    )


def join(address: str, **options: str) -> Grid:
    """As `gridtrain.join`, with less patience."""
    config = JoinConfig.from_environment({}, coordinator=address, name="anna", **options)
    transport = ZeroMQTransport(secrets.token_bytes(32), "gridtrain test")
    return Grid(transport, replace(config, deadlines=IMPATIENT))


# -- the address -----------------------------------------------------------------------------------------


def test_a_script_without_an_agent_and_without_an_address() -> None:
    done = run(sys.executable, "-c", "import gridtrain; gridtrain.join()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gridtrain.errors.ConfigError: no coordinator is named -> start the script with `gridtrain worker "
        "tcp://HOST:7700 -- python train.py`, or set GRIDTRAIN_COORDINATOR=tcp://HOST:7700"
    )


@pytest.mark.parametrize("address", ["http://10.0.0.5", "10.0.0.5:", "tcp://10.0.0.5:7700/run", "a b"])
def test_a_malformed_address(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gridtrain.join(address)
    assert str(caught.value) == (
        f"an address is tcp://host:port, got {address!r} -> write for instance tcp://192.168.1.20:7700; "
        "the coordinator prints its own"
    )


def test_an_address_as_people_write_it(start_coordinator: Callable[..., str]) -> None:
    with gridtrain.join(start_coordinator().removeprefix("tcp://")) as grid:
        assert grid.step == 0


@pytest.mark.parametrize("option", ["name", "run"])
def test_a_name_too_long_for_the_wire(option: str) -> None:
    with pytest.raises(ConfigError, match=r"^the name of .* is 65 bytes, .* must be at most 64 bytes"):
        gridtrain.join("127.0.0.1", **{option: "x" * 65})


def test_without_an_agent_it_listens_towards_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(ZeroMQTransport):
        def listen(self, address: str) -> str:
            raise TransportError(f"told to listen at {address}")

    monkeypatch.setattr(grid_module, "listen_address", lambda coordinator: f"the way to {coordinator}")
    for options, told in (
        ({}, "the way to tcp://10.0.0.9:7700"),
        ({"listen": "tcp://*:7701"}, "tcp://.:7701"),
    ):
        config = JoinConfig.from_environment({}, coordinator="tcp://10.0.0.9:7700", **options)
        with pytest.raises(TransportError, match=f"^told to listen at {told}$"):
            Grid(Told(secrets.token_bytes(32), "gridtrain test"), config)


def test_nobody_is_there() -> None:
    with pytest.raises(CoordinatorUnreachable) as caught:
        join("tcp://127.0.0.1:1")
    assert "no coordinator answered at tcp://127.0.0.1:1 within " in caught.value.reason
    assert caught.value.remedy == (
        "check the address and the port, and that `gridtrain coordinator` is running there"
    )


def test_somebody_else_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CoordinatorUnreachable, match=f"no coordinator answered at {address} within"):
            join(address)


@pytest.mark.parametrize(
    ("listen", "told"),
    [
        ("taken", "the port is taken -> stop the program that uses it, choose another port, or use port 0"),
        ("tcp://192.0.2.1:0", "no interface of this machine has that address -> listen at"),
        ("7701", '-> an address looks like "tcp://\\*:7000", with port 0 for any free one'),
    ],
)
def test_where_to_listen(start_coordinator: Callable[..., str], listen: str, told: str) -> None:
    """And nothing is left behind: a second try with port 0 works, in the same process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = start_coordinator()
        with pytest.raises(TransportError, match=f"^cannot listen at .*{told}"):
            join(address, listen=f"tcp://127.0.0.1:{port}" if listen == "taken" else listen)
        join(address, listen="tcp://127.0.0.1:0").close()


# -- the run -----------------------------------------------------------------------------------------


def test_another_runs_coordinator(start_coordinator: Callable[..., str]) -> None:
    with pytest.raises(JoinRefused) as caught:
        join(start_coordinator(), run="mine")
    assert caught.value.code == "wrong-run"
    assert str(caught.value) == (
        'this coordinator serves the run "default", not "mine" -> join with --run default, '
        "or ask for the address of the other run's coordinator"
    )


def test_another_version(start_coordinator: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator greets with protocol 9; who joins speaks 1."""
    with monkeypatch.context() as patch:
        patch.setattr(zeromq, "PROTOCOL_VERSION", 9)
        address = start_coordinator()
    with pytest.raises(GridtrainError) as caught:
        join(address)
    told = r"protocol 9, this software speaks 1 .* -> install the same version of gridtrain on both machines"
    with pytest.raises(GridtrainError, match=told):
        raise caught.value


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
def test_a_package_of_the_extra_is_missing(without: Callable[[str], dict[str, str]], package: str) -> None:
    done = run(sys.executable, "-c", "import gridtrain; gridtrain.join()", **without(package))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"gridtrain.errors.ConfigError: gridtrain.join needs {package}, not installed here -> "
        "pip install 'gridtrain[torch]' (or install the torch build that fits your GPU first)"
    )


def test_the_demo_without_torch(without: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    """Found out before four processes fail one by one; no traceback."""
    out = tmp_path / "results"
    done = run(sys.executable, "-m", "gridtrain.cli", "demo", "--out", str(out), **without("torch"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gridtrain: gridtrain demo needs torch, not installed here -> pip install")
    assert not out.exists()


def test_a_coordinator_needs_no_torch(without: Callable[[str], dict[str, str]]) -> None:
    done = run(sys.executable, "-m", "gridtrain.cli", "coordinator", "--help", **without("torch"))
    assert done.returncode == 0


# -- a training script that raises -----------------------------------------------------------------------

SCRIPT = """
import sys, torch, gridtrain
torch.set_num_threads(1)
data = [(torch.tensor([float(i)]), torch.tensor([2.0 * i])) for i in range(8)]
grid = gridtrain.join()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.Dense())
for inputs, targets in grid.batches(data, batch_size=1, steps=6):
    if grid.step == 3 and sys.argv[1] == "raises":
        raise ValueError("no such column")
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
    print(f"step {grid.step} of a group of {grid.world_size}")
"""


def test_a_script_that_raises(start_coordinator: Callable[..., str], tmp_path: Path) -> None:
    """Its traceback and one line of the agent's; exit code 1.  The other worker goes on to the end."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    address = start_coordinator(min_workers=2)

    def agent(name: str, how: str) -> subprocess.Popen[str]:
        options = ("--name", name, "--export-dir", str(tmp_path / name))
        command = (sys.executable, "-u", str(script), how)
        return subprocess.Popen(
            (sys.executable, "-m", "gridtrain.cli", "worker", address, *options, "--", *command),
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
    *_, traceback_end, agents_line = raised_err.splitlines()
    assert traceback_end == "ValueError: no such column"
    assert agents_line.startswith("gridtrain worker: the script ended with exit code 1 after ")
    assert agents_line.endswith("-> its own message is above; with --restarts N it is started again")

    assert agents[0].returncode == 0, err
    assert out.splitlines() == [f"step {step} of a group of {2 if step <= 3 else 1}" for step in range(1, 7)]
    assert "Traceback" not in err
    assert (tmp_path / "anna" / "final.safetensors").exists()


def test_a_script_that_is_refused(start_coordinator: Callable[..., str], tmp_path: Path) -> None:
    """A mistake in the script's own calls ends in one sentence, too, under the agent as without it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("steps=6", "steps=6, epochs=1"))
    agent = (sys.executable, "-m", "gridtrain.cli", "worker", start_coordinator(), "--")
    done = run(*agent, sys.executable, str(script), "works")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *_, sentence, agents_line = done.stderr.splitlines()
    assert sentence == (
        "gridtrain: train.py, line 9: ConfigError: "
        "the run's end is epochs=1, steps=6; exactly one must be given -> "
        "give grid.batches either epochs= or steps="
    )
    assert agents_line.startswith("gridtrain worker: the script ended with exit code 1 after ")
