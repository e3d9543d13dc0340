"""The whole demo with real processes, in its quick form: its results, and the bytes of each role."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gridtrain.tools.demo.orchestrator import remove_old_files
from gridtrain.tools.demo.recipe import SIZES

pytestmark = pytest.mark.integration

WITHIN_S = 120.0
DEMO = (sys.executable, "-m", "gridtrain", "demo", "--quick")


def test_the_quick_demo_writes_its_results_and_counts_what_each_role_sends(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = subprocess.run(
        [*DEMO, "--workers", "2", "--steps", "20", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "On one machine a single process would be faster" in done.stdout
    assert str(out / "loss.svg") in done.stdout

    dense, sparse = json.loads((out / "metrics.json").read_text())["runs"]
    n, workers, density = SIZES["tiny"].parameters, 2, 0.05
    ring_bytes = 2 * (workers - 1) / workers * 4 * n
    assert dense["sent_bytes"]["data"] / 20 == pytest.approx(ring_bytes, rel=0.1)
    entry_bytes = 2 + (2 + 4.4) / 8  # fp16; Elias-Fano: 2 bits and log2(1 / density) of low bits
    butterfly_bytes = 1 * density * n * entry_bytes  # log2(2) = 1 payload
    assert sparse["sent_bytes"]["data"] / 20 == pytest.approx(butterfly_bytes, rel=0.1)

    for run in (dense, sparse):
        losses = [m["held_out"] for m in run["measurements"]]
        assert [m["step"] for m in run["measurements"]] == [5, 10, 15, 20]
        assert losses[-1] < losses[0] < 5.5, losses

    for part in ("dense", sparse["exchange"]):
        remove_old_files(out / part)  # as the next demo does first
        left = [*(out / part).glob("*.log"), *(out / part).glob("gridtrain/*/identities/*/worker-*")]
        assert not left


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_and_everything_that_it_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "results"
    demo = subprocess.Popen(
        [*DEMO, "--workers", "2", "--steps", "100000", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        steps = out / "dense" / "steps.jsonl"
        until_s = time.monotonic() + WITHIN_S
        while not steps.exists() and demo.poll() is None and time.monotonic() < until_s:
            time.sleep(0.1)
        workers = {int(path) for path in processes_naming(str(out))} - {demo.pid}
        demo.send_signal(number)
        text, _ = demo.communicate(timeout=WITHIN_S)
    finally:
        demo.kill()
        demo.wait()

    assert demo.returncode == 128 + number, text
    assert f"stopped by {number.name}; all processes of the demo have ended" in text
    assert len(workers) == 5, workers  # coordinator, two agents, two scripts
    assert not processes_naming(str(out))


def processes_naming(text: str) -> list[str]:
    """Processes of this machine with `text` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found.append(folder.name)
        except OSError:
            continue
    return [name for name in found if int(name) != os.getpid()]
