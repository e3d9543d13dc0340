"""The examples with other people's trainers: two workers, different samples, one model at the end."""

import importlib.util
from itertools import chain

import pytest

pytestmark = pytest.mark.integration

EXAMPLES = {
    "hf_trainer.py": ("transformers", 8),
    "accelerate_loop.py": ("accelerate", 4),
    "lightning_trainer.py": ("lightning", 4),
}
STEPS = 30


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_workers_on_different_samples_hold_the_same_model(example, trained) -> None:
    package, batch_size = EXAMPLES[example]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-adapters")
    ends = trained(example, workers=2, steps=STEPS)
    drawn = [end["samples"] for end in ends]
    assert [len(samples) for samples in drawn] == [STEPS * batch_size] * 2
    assert len(set(chain(*drawn))) == 2 * STEPS * batch_size, "a sample came twice within one pass"
    assert len({end["digest"] for end in ends}) == 1
    for end in ends:
        assert end["losses"][-1] < end["losses"][0] - 0.3, end["losses"]
