"""Checkpoints of commit 330f465 contain the models as they were, and training continues from them.

<variant>/worker-N/step-00000003      one for each kind of exchange and optimizer; see data/scripts/train.py
stages/worker-N/blocks-.../...        of a model in two stages, each worker with a copy of the other's
known.json                            the state of the training loop at that step
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from oldformats.files import DATA, described, private_copy, recorded, script
from oldformats.library import (
    ConfigError,
    LocalGroup,
    Span,
    StageCheckpointStore,
    content_digest,
    export_model,
    frame_state,
    model_tensors,
    pick_up_residual,
    read_checkpoint,
    read_checkpoint_head,
    restore_state,
)

STEP, STEPS = 3, 12
WITHIN_S = 60.0
VARIANTS = ("gtopk", "topk", "dense", "local", "auto", "overlap")
EXCHANGES = {
    "gtopk": "GTopK(density=0.25, momentum=0.875, values=fp16)",
    "topk": "TopK(density=0.5, momentum=0.0, values=fp32)",
    "dense": "Dense()",
    "local": "LocalSteps(every=2, exchange=GTopK(density=0.5, momentum=0.0, values=int8), "
    "outer_learning_rate=0.75, outer_momentum=0.5)",
    "auto": "auto(values=fp16)",
    "overlap": "GTopK(density=0.25, momentum=0.0, values=bf16) always in at most 2 buckets "
    "of at least 8 elements",
}
RESIDUALS: dict[str, list[str]] = {"dense": [], "gtopk": ["residual", "u"]}
"""The others have only a residual, as they have no momentum of their own."""


def copy_of(variant: str, tmp_path: Path) -> Path:
    return private_copy(DATA / "checkpoints" / variant, tmp_path / variant)


def known_of(variant: str) -> Any:
    return recorded(f"checkpoints/{variant}/known.json")


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_is_read(variant: str, tmp_path: Path) -> None:
    for folder in sorted(copy_of(variant, tmp_path).glob("worker-*")):
        known = known_of(variant)[folder.name]
        found = read_checkpoint(folder / f"step-{STEP:08d}")
        assert described(model_tensors(found.document, found.tensors)) == known["model"]
        assert described(found.residual) == known["residual"]
        assert sorted(found.residual) == RESIDUALS.get(variant, ["residual"])
        assert (found.step, found.position.applied, found.position.ledger.step) == (STEP, STEP - 1, STEP)
        calls = 2 if variant == "local" else 1
        assert found.position.ledger.consumed == found.position.ledger.cursor == STEP * 2 * 6 * calls
        assert dict(found.facts)["exchange"] == EXCHANGES[variant]
        assert (found.position, found.facts) == read_checkpoint_head(found.path)
        assert content_digest(found.document, found.tensors) == found.position.digest


def test_the_optimizer_and_the_trackers_are_in_it(tmp_path: Path) -> None:
    """The state_dict of AdamW with two groups, and that of a scheduler, through another model's own."""
    training = script("train")
    found = read_checkpoint(copy_of("dense", tmp_path) / "worker-0" / f"step-{STEP:08d}")
    model = training.build_model()
    optimizer = training.adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    restore_state(frame_state(found.document, found.tensors), model, optimizer, {"scheduler": scheduler})
    assert scheduler.state_dict()["step_size"] == 2 and scheduler.last_epoch == STEP
    assert [group["lr"] for group in optimizer.param_groups] == known_of("dense")["worker-0"]["lr"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.125, 0.0]
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEP}
    assert described(model.state_dict()) == known_of("dense")["worker-0"]["model"]


def test_a_checkpoint_is_exported_as_a_plain_file(tmp_path: Path) -> None:
    exported = export_model(copy_of("gtopk", tmp_path), tmp_path / "model.safetensors")
    assert exported.step == STEP
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert described(found).items() == known_of("gtopk")["worker-0"]["model"].items()


def test_a_damaged_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = copy_of("gtopk", tmp_path) / "worker-0" / f"step-{STEP:08d}"
    tensors = bytearray((path / "tensors.safetensors").read_bytes())
    tensors[-3] ^= 1
    (path / "tensors.safetensors").write_bytes(tensors)
    with pytest.raises(ConfigError) as refused:
        read_checkpoint(path)
    assert str(path) in str(refused.value) and refused.value.remedy


def test_a_checkpoint_of_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = copy_of("gtopk", tmp_path) / "worker-0" / f"step-{STEP:08d}"
    body = json.loads((path / "state.json").read_text())
    assert body["format"] == 1
    (path / "state.json").write_text(json.dumps(body | {"format": 2}))
    with pytest.raises(ConfigError) as refused:
        read_checkpoint(path)
    assert str(path) in str(refused.value) and refused.value.remedy


def test_a_damaged_residual_is_left_out(tmp_path: Path) -> None:
    path = copy_of("gtopk", tmp_path) / "worker-0" / f"step-{STEP:08d}"
    residual = bytearray((path / "residual.safetensors").read_bytes())
    residual[-3] ^= 1
    (path / "residual.safetensors").write_bytes(residual)
    assert read_checkpoint(path).residual == {}


# -- continuing a run ------------------------------------------------------------------------------


def together(count: int, folder: Path, work: Callable[[Any, int], None]) -> None:
    """Workers in threads, each with the state folder `worker-N`."""
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            state = folder / f"worker-{number}"
            with group.join(
                f"worker-{number}", checkpoint_every=3, state_dir=str(state), export_dir=str(folder)
            ) as grid:
                work(grid, number)
        except BaseException as error:
            failed.append(error)

    with LocalGroup(min_workers=count) as group:
        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_from_a_checkpoint(variant: str, tmp_path: Path) -> None:
    """The worker describes its training in the same words, or the checkpoint would not be used."""
    folder, training = copy_of(variant, tmp_path), script("train")
    seen: list[tuple[int, Any, Any]] = []

    def work(grid: Any, number: int) -> None:
        def look(step: int, model: Any, optimizer: Any) -> None:
            seen.append((step, described(model.state_dict()), described(optimizer.residual.state())))

        training.train(grid, variant, STEPS, look=look)
        assert grid.finished

    together(1, folder, work)
    known = known_of(variant)["worker-0"]
    step, model, residual = seen[0]
    assert step == STEP and model == known["model"]
    assert residual == known["residual"]
    assert sorted({step for step, *_ in seen}) == list(range(STEP, STEPS))


# -- a model in stages -----------------------------------------------------------------------------


def stores(folder: Path) -> list[StageCheckpointStore]:
    """The stores of two workers."""
    found = []
    for path in sorted(folder.glob("worker-*")):
        facts = read_checkpoint_head(next(path.glob("blocks-*/step-*")))[1]
        found.append(
            StageCheckpointStore(
                path, facts, every=3, keep=2, report=lambda info: None, load_state=lambda *_: None
            )
        )
    return found


def test_each_worker_has_both_stages(tmp_path: Path) -> None:
    for store in stores(copy_of("stages", tmp_path)):
        info = store.stored_checkpoints()
        assert [(one.applied, one.layers) for one in info] == [(STEP - 1, Span(0, 2)), (STEP - 1, Span(2, 4))]
        assert all(store.is_intact(one) for one in info)


def test_checkpoints_of_stages_are_read(tmp_path: Path) -> None:
    known = {each["stage"]: each for each in known_of("stages").values()}
    for store in stores(copy_of("stages", tmp_path)):
        own = 0
        for stage, info in enumerate(store.stored_checkpoints()):
            found = store.load(info)
            assert described(model_tensors(found.document, found.tensors)) == known[stage]["model"]
            assert described(found.residual) in ({}, known[stage]["residual"])
            own += bool(found.residual)
        assert own == 1, "a residual stays with its worker"


def test_a_residual_that_was_left_is_read_back(tmp_path: Path) -> None:
    folder = copy_of("stages", tmp_path)
    for name, known in known_of("stages").items():
        path = next((folder / name).glob("blocks-*/left")).parent
        facts = read_checkpoint_head(next(path.glob("step-*")))[1]
        residual = known["residual at the end"]["residual"]
        left = pick_up_residual(path, facts, residual[1][0])
        assert left is not None and left.applied == 4
        assert left.residual_N.astype("<f4").tobytes().hex() == residual[2]


def test_the_stages_are_assembled(tmp_path: Path) -> None:
    exported = export_model(copy_of("stages", tmp_path), tmp_path / "model.safetensors")
    assert exported.step == STEP
    whole = {name: value for each in known_of("stages").values() for name, value in each["model"].items()}
    assert described(safetensors.torch.load_file(tmp_path / "model.safetensors")).items() == whole.items()


def test_training_in_stages_goes_on(tmp_path: Path) -> None:
    folder, staged = copy_of("stages", tmp_path), script("pipeline")
    first: dict[int, Any] = {}

    def work(grid: Any, number: int) -> None:
        def look(step: int, pipe: Any) -> None:
            first.setdefault(pipe.stage, (step, described(pipe.module.state_dict())))

        staged.train(grid, STEPS, look=look)
        assert grid.finished

    together(2, folder, work)
    known = {each["stage"]: (STEP, each["model"]) for each in known_of("stages").values()}
    assert first == known
    assert np.all([np.isfinite(value.numpy()).all() for value in final(folder).values()])


def final(folder: Path) -> dict[str, torch.Tensor]:
    """The exported parts of the model of the finished run."""
    parts = sorted(folder.glob("final*.safetensors"))
    assert len(parts) == 2
    return {name: value for part in parts for name, value in safetensors.torch.load_file(part).items()}
