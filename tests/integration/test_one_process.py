"""A dense group trains as one process with the whole batch would: the same curve, every sample once a pass.

position   0 ...... 63 | 64 ..... 127 | ... | 448 449 | 450 ...      a pass of 450 samples: 7 steps of 64
step            0             1         ...      7         8         and one of 2, of which ranks 2 and 3
                                                                     have no samples
"""

from __future__ import annotations

import runpy
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gridtrain.training.data import sampler

pytestmark = pytest.mark.integration
WORKERS, EPOCHS, SAMPLES, BATCH = 4, 5, 450, 64
STEPS_A_PASS = 8
LAST = -2  # the last step with a whole batch
MAX_DIFFERENCE = 1e-5
"""For sums of float32 numbers of size 1 in another order: some 2**-24 each; measured 2e-7."""


@pytest.fixture(scope="module")
def script() -> dict:
    """The global names of the workers' script."""
    return runpy.run_path(str(Path(__file__).parent / "scripts" / "train.py"))


@pytest.fixture(scope="module")
def group(new_group):
    """A group that has ended, with the lines of its output."""
    with new_group(min_workers=WORKERS) as group:
        for number in range(WORKERS):
            group.add(f"worker-{number}", global_batch_size=BATCH, epochs=EPOCHS, samples=SAMPLES, seed=1)
        group.finish()
        return group


def test_the_training_curve_is_that_of_one_process(group, script) -> None:
    theirs = [sum(len(line["samples"]) * line["loss"] for line in lines) for lines in rounds_of(group)]
    counts = [sum(len(line["samples"]) for line in lines) for lines in rounds_of(group)]
    theirs = [total / count for total, count in zip(theirs, counts, strict=True)]

    model = script["build_model"](seed=1)
    optimizer = script["build_optimizer"](model, "dense")
    points = script["Points"](SAMPLES)
    ours = []
    for number in range(EPOCHS):
        order = sampler.permutation(SAMPLES, 0, number).tolist()
        for start in range(0, SAMPLES, BATCH):
            x_BF, y_B, _ = sampler.fetch_batch(points, order[start : start + BATCH])
            loss = torch.nn.functional.cross_entropy(model(x_BF), y_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ours.append(loss.item())

    assert len(theirs) == len(ours) == EPOCHS * STEPS_A_PASS
    of_losses = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    exported = load_file(group.folder / "final.safetensors")
    of_parameters = max(float((exported[name] - p).abs().max()) for name, p in model.state_dict().items())
    print(
        f"{len(ours)} steps, {WORKERS} workers against one process, loss {ours[0]:.3f} -> {ours[LAST]:.3f}:"
    )
    print(f"largest difference of losses {of_losses:.1e}, of parameters {of_parameters:.1e}")
    assert ours[LAST] < 0.5 * ours[0]
    assert of_losses < MAX_DIFFERENCE and of_parameters < MAX_DIFFERENCE


def test_every_sample_counts_once_in_each_pass(group) -> None:
    taken = list(group.samples_by_round().values())
    assert [len(samples) for samples in taken[:STEPS_A_PASS]] == [BATCH] * 7 + [2]
    for number in range(EPOCHS):
        one_pass = taken[number * STEPS_A_PASS :][:STEPS_A_PASS]
        assert sorted(chain(*one_pass)) == list(range(SAMPLES)), f"pass {number}"
    tail = {line["rank"]: len(line["samples"]) for line in rounds_of(group)[STEPS_A_PASS - 1]}
    assert tail == {0: 1, 1: 1, 2: 0, 3: 0}


def test_the_ledger_ends_the_run_and_the_first_worker_exports_the_model(group, script) -> None:
    """`group.finish` waited for the coordinator's exit code 0."""
    (finished,) = group.events("finished")
    assert finished == {"reason": f"{WORKERS} workers reached the end of the run"}
    exported = load_file(group.folder / "final.safetensors")
    model = script["build_model"](seed=2)
    model.load_state_dict(exported)
    ends = [program.marked("end")[0] for program in group.workers.values()]
    assert {end["parameters"] for end in ends} == {script["digest_of"](model.parameters())}


def rounds_of(group) -> list[list[dict]]:
    """The "round" lines of each committed attempt, in order."""
    lines = [line for program in group.workers.values() for line in program.marked("round")]
    return [[line for line in lines if tuple(line["round"]) == name] for name in group.committed()]
