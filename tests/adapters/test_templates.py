"""Templates of `gridtrain new` for language models: workers train, come and go; libraries load the result."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gridtrain.cli.new import TEMPLATES, templates

pytestmark = pytest.mark.integration

RECORDED = Path(__file__).parent / "scripts" / "recorded.py"
KILLED, STOPPED = 128 + signal.SIGKILL, 128 + signal.SIGTERM


@pytest.fixture(params=["lora", "pretrain"])
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for requirement in TEMPLATES[request.param].requires:
        package = requirement.split(">=")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-adapters")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return request.param


def write_run(template: str, folder: Path, changes: dict[str, str]) -> str:
    """Write the run's files, with `changes` in its script; return the script's path."""
    texts = templates("mine", template)
    for pattern, replacement in changes.items():
        texts["train.py"], found = re.subn(pattern, replacement, texts["train.py"], flags=re.M)
        assert found == 1
    for name, text in texts.items():
        (folder / name).write_text(text)
    return str(folder / "train.py")


def test_a_template_trains_without_a_download_and_its_model_generates(
    template: str, new_group, tmp_path: Path
) -> None:
    short = {r"^EXCHANGES, LOCAL_STEPS = \d+, \d+": "EXCHANGES, LOCAL_STEPS = 10, 4"}
    script = write_run(template, tmp_path, short)
    with new_group(min_workers=2) as group:
        for name in ("anna", "bert"):
            group.start(name, sys.executable, script)
        group.finish()
        said = "\n".join(worker.said() for worker in group.workers.values())
        losses = [float(text) for text in re.findall(r"exchange \d+: held-out loss ([\d.]+)", said)]
        assert len(losses) == 2 and losses[1] < losses[0] < 5.5, said
        if template == "lora":
            words = (
                sys.executable,
                str(tmp_path / "generate.py"),
                str(group.folder / "final-adapter"),
                "import ",
            )
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("import ") and len(done.stdout) > len("import ") + 20
            return
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(group.folder / "final-model")
        assert model.generate(torch.tensor([[105, 109]]), max_new_tokens=5).shape == (1, 7)


def test_every_sample_counts_once_whoever_dies_joins_or_leaves(
    template: str, new_group, tmp_path: Path
) -> None:
    """In one pass over the data clara dies, dora joins, the coordinator dies and returns, and bert leaves."""
    once = {r"steps=EXCHANGES\)": "epochs=1)", r"(LOCAL_STEPS = \d+), \d+": r"\1, 4"}
    script = write_run(template, tmp_path, once)
    with new_group(min_workers=3, codes=frozenset({0, KILLED, STOPPED})) as group:
        pace = group.gate()

        def start(name: str, gate: str = "") -> None:
            group.start(name, sys.executable, str(RECORDED), script, gate)

        def committed(name: str) -> int:
            return sum(line["committed"] for line in group.workers[name].marked("outcome"))

        def train_step(name: str = "anna") -> None:
            """Let anna begin a step; wait until the worker has reported one more."""
            before = committed(name)
            pace.open()
            group.wait(f"a step of {name}", lambda: committed(name) > before)

        start("anna", pace.path)
        start("bert")
        start("clara")
        group.wait("two steps", lambda: committed("anna") == 2)
        os.kill(group.workers["clara"].marked("loaded")[0]["pid"], signal.SIGKILL)
        group.wait("clara's death", lambda: bool(group.events("lost")))
        train_step()
        start("dora")
        group.wait("dora", lambda: bool(group.events("following")))
        while group.events("generation")[-1]["workers"] < 3:
            train_step()
        train_step("dora")
        before = len(group.events("training"))
        group.kill_coordinator()
        train_step()
        group.start_coordinator()
        group.wait("a generation", lambda: len(group.events("training")) > before)
        train_step()
        group.workers["bert"].process.terminate()
        group.wait("bert's departure", lambda: bool(group.events("left")))
        for _ in range(100):  # more than there are steps
            pace.open()
        ends = group.finish()
    assert [group.workers[name].code for name in ("anna", "bert", "clara", "dora")] == [0, STOPPED, KILLED, 0]
    anna, dora = ({name: value for name, value in end.items() if name != "at_s"} for end in ends)
    assert anna == dora, "model with its base, optimizer, schedule and step"
    taken = Counter(index for samples in group.samples_by_round().values() for index in samples)
    assert taken == Counter(range(anna["consumed"])), "each sample in exactly one committed step"


def test_a_base_that_cannot_be_loaded_is_named_before_the_worker_joins(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-adapters")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = templates("mine", "lora")["train.py"].replace('BASE = ""', 'BASE = "./missing"', 1)
    (tmp_path / "train.py").write_text(script)
    words = (sys.executable, str(tmp_path / "train.py"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "the base './missing' cannot be loaded" in done.stderr and "-> set BASE" in done.stderr
    assert "Traceback" not in done.stderr
