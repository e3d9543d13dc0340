"""Templates of `gridtrain new` for language models: two workers train, and the libraries load the result."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gridtrain.cli.new import TEMPLATES, templates

pytestmark = pytest.mark.integration


@pytest.fixture(params=["lora", "pretrain"])
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for requirement in TEMPLATES[request.param].requires:
        package = requirement.split(">=")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-adapters")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return request.param


def test_a_template_trains_without_a_download_and_its_model_generates(
    template: str, new_group, tmp_path: Path
) -> None:
    texts = templates("mine", template)
    texts["train.py"], found = re.subn(
        r"^EXCHANGES, LOCAL_STEPS = \d+, \d+", "EXCHANGES, LOCAL_STEPS = 10, 4", texts["train.py"], flags=re.M
    )
    assert found == 1
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with new_group(min_workers=2) as group:
        for name in ("anna", "bert"):
            group.start(name, sys.executable, str(tmp_path / "train.py"))
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
