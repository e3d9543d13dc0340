"""The examples of LoRA with own and others' loops: two workers, different samples, one model at the end."""

import importlib.util
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

EXAMPLES = {
    "lora_loop.py": ("transformers peft", 8),
    "hf_trainer.py": ("transformers peft", 8),
    "sft_trainer.py": ("transformers peft trl datasets", 4),
    "accelerate_loop.py": ("transformers peft accelerate", 8),
    "lightning_trainer.py": ("transformers peft lightning", 8),
}
STEPS = 30
MAX_LINES = 60


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_workers_on_different_samples_hold_the_same_model(example, trained, monkeypatch) -> None:
    packages, batch_size = EXAMPLES[example]
    missing = [name for name in packages.split() if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-adapters")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ends = trained(example, workers=2, steps=STEPS)
    drawn = [end["samples"] for end in ends]
    assert [len(samples) for samples in drawn] == [STEPS * batch_size] * 2
    assert len(set(chain(*drawn))) == 2 * STEPS * batch_size, "a sample came twice within one pass"
    assert len({end["digest"] for end in ends}) == 1
    for end in ends:
        assert end["losses"][-1] < end["losses"][0] - 0.3, end["losses"]


def test_the_examples_are_short() -> None:
    for example in (*EXAMPLES, "pipeline_llama.py"):
        assert len((Path(__file__).parents[2] / "examples" / example).read_text().splitlines()) < MAX_LINES
