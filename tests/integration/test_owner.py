"""A volunteer's rules with real processes: its worker obeys and drops them in the middle of a run.

coordinator, three workers (owner, one, two), each `gridtrain worker ... -- python train.py`
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gridtrain.cli.main import cli

pytest.importorskip("torch")
pytestmark = pytest.mark.integration
WITHIN_S = 90.0
CLI = (sys.executable, "-m", "gridtrain")
TRAIN = """
import os, sys, time, hashlib, torch, gridtrain
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Linear(64, 64)
data = [torch.full((64,), float(i % 5) - 2.0) for i in range(64)]
until = sys.argv[1]
with gridtrain.join() as grid:
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = grid.optimizer(sgd, model, exchange=gridtrain.Dense())
    for batch in grid.batches(data, batch_size=2, steps=100_000):
        if os.path.exists(until) and grid.step % 50 == 0:
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            print("MODEL", grid.step, hashlib.sha256(flat.numpy().tobytes()).hexdigest(), flush=True)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.005)  # a step of 5 ms of "computing"
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
    for process in started:
        process.communicate(timeout=WITHIN_S)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run a command in this process to its end, as it is repeated often; return its output."""
    mine = environment(tmp_path)
    hidden = {name: None for name in os.environ if name not in mine}

    def command(*arguments: str) -> str:
        done = CliRunner().invoke(cli, arguments, env=mine | hidden)
        assert done.exit_code == 0, done.output
        return done.stdout

    return command


def environment(folder: Path, **more: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")}
    return mine | {"XDG_STATE_HOME": str(folder / "home")} | more


def doctor(folder: Path, invitation: str) -> None:
    """Check another machine while two train: its links are measured, and its contribution is estimated."""
    done = subprocess.run(
        (*CLI, "doctor", invitation),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env=environment(folder, XDG_STATE_HOME=str(folder / "another machine")),
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {entry["check"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    for name in ("coordinator", "member 1", "member 2"):
        assert found[name]["rtt_s"] > 0 and found[name]["up_Bps"] > 1e5 and found[name]["down_Bps"] > 1e5
    assert found["reachable"]["level"] == "ok" and found["run"]["world_size"] == 2
    said = found["prediction"]
    assert "with this machine a step would take" in said["text"]
    is_measured = "flops" in found["torch"]  # on a busy machine, torch can take longer than the doctor waits
    assert ("assumed" in said["text"]) == (not is_measured), said["text"]
    assert said["step_s"] > 0 and said["with_s"] > 0 and -1 < said["gain"] < 1
    print("\n".join(f"{entry['level']:8} {name:12} {entry.get('text', '')}" for name, entry in found.items()))


def wait_until(look: Callable[[], Any], what: str) -> Any:
    until_s = time.monotonic() + WITHIN_S
    while not (found := look()):
        assert time.monotonic() < until_s, what
        time.sleep(0.1)
    return found


def test_a_volunteers_rules_are_obeyed_in_a_real_group(
    tmp_path: Path, processes: list[subprocess.Popen[str]], run: Callable[..., str]
) -> None:
    script, flag, sensors = tmp_path / "train.py", tmp_path / "end", tmp_path / "sensors.json"
    script.write_text(TRAIN)

    def report_readings(**readings: Any) -> None:
        partial = sensors.with_suffix(".partial")
        partial.write_text(json.dumps(readings))
        partial.replace(sensors)

    report_readings(on_battery=False, temperature_C=50)
    state = tmp_path / "state"
    place = ("--listen", "tcp://127.0.0.1:0", "--state", str(state), "--min-workers", "3")
    started = subprocess.Popen(
        (*CLI, "coordinator", *place), stdout=subprocess.PIPE, text=True, env=environment(tmp_path)
    )
    processes.append(started)
    assert started.stdout is not None
    assert re.search(r"tcp://\S+", started.stdout.readline())
    invitation = run("invite", "--state", str(state), "--uses", "3").strip()
    outputs = {}
    for name in ("owner", "one", "two"):
        outputs[name] = tmp_path / f"{name}.log"
        with open(outputs[name], "w") as log:
            command = (*CLI, "worker", invitation, "--name", name, "--export-dir", str(tmp_path / name))
            process = subprocess.Popen(
                (*command, "--checkpoint-every", "0", "--", sys.executable, str(script), str(flag)),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(tmp_path, GRIDTRAIN_SENSORS=str(sensors)),
            )
            processes.append(process)

    def status() -> dict[str, Any]:
        status = json.loads(run("status", "--state", str(state), "--json"))
        assert isinstance(status, dict)
        return status

    def world() -> int:
        return int(status()["world_size"])

    def owner(*words: str) -> dict[str, Any]:
        shown = json.loads(run("worker", *words, "--worker", "owner"))
        assert isinstance(shown, dict)
        return shown

    def obeyed() -> dict[str, Any]:
        """What `show` prints once the script has obeyed; the coordinator knows that sooner."""
        shown = owner("show")
        return shown if shown["obeyed"] and shown["state"] in ("paused", "training") else {}

    def logs() -> str:
        return "\n".join(f"{name}:\n{path.read_text()[-2000:]}" for name, path in outputs.items())

    wait_until(lambda: status()["phase"] == "training" and world() == 3, logs())
    owner("set", "battery=pause", "upload=80Mbit")
    report_readings(on_battery=True, temperature_C=50)
    wait_until(lambda: world() == 2, "battery")
    (line,) = wait_until(lambda: status()["resting"], "the status shows the paused worker")
    assert (line["name"], line["reason"]) == ("owner", "paused by its owner: battery")
    shown = wait_until(obeyed, "the agent shows that it has left")
    assert shown["state"] == "paused" and shown["reason"] == "battery"
    step, moved = status()["step"], shown["moved_today_bytes"]
    wait_until(lambda: status()["step"] > step + 20, "two workers go on")
    assert moved > 0 and owner("show")["moved_today_bytes"] == moved, "no byte is sent while paused"

    doctor(tmp_path, run("invite", "--state", str(state)).strip())
    report_readings(on_battery=False, temperature_C=50)
    wait_until(lambda: world() == 3, "it is back")
    assert status()["resting"] == []
    assert wait_until(obeyed, "the agent shows that it is back")["state"] == "training"
    owner("pause", "--for", "1h")
    wait_until(lambda: world() == 2, "the owner's pause")
    assert "on request, until" in wait_until(lambda: status()["resting"], "the paused worker")[0]["reason"]
    owner("resume")
    wait_until(lambda: world() == 3, "it is back again")
    flag.touch()

    def models() -> dict[str, set[tuple[str, str]]]:
        pattern = re.compile(r"MODEL (\d+) (\w+)")
        return {name: set(pattern.findall(path.read_text())) for name, path in outputs.items()}

    common = wait_until(
        lambda: set.intersection(*({step for step, _ in m} for m in models().values())), logs()
    )
    for step_said in common:
        assert len({digest for m in models().values() for step, digest in m if step == step_said}) == 1
    shown = owner("stop", "--after-step")
    assert shown["stopping"]
    worker = processes[1]
    assert worker.wait(WITHIN_S) == 0, logs()
    assert outputs["owner"].read_text().count("paused by its owner") == 2, "one process for all pauses"
    wait_until(lambda: world() == 2, "it has left")
