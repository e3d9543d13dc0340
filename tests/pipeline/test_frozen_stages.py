"""LoRA on a pipeline: each worker loads the frozen base, which is compared once, and neither sent nor saved.

base.safetensors --init=--> every block, on every worker       adapters: states, checkpoints, exports
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from absent_names import absent_names
from brisk import LOSING
from pipeline_group import Seen, Workers, loss_fn
from torch import Tensor, nn

import gridtrain
from gridtrain.core.messages import CheckpointInfo, LedgerState
from gridtrain.errors import ConfigError, JoinRefused, RemoteProtocolError
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.training.checkpoint import checkpoint_merge, checkpoint_store, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint
from gridtrain.training.checkpoint.frozen_base import FrozenBase
from gridtrain.training.checkpoint.model_export import export_model

STEPS = 16
SIZES = {0: (2, 8), 2: (8, 8), 3: (8, 1)}
TRAINED = {f"{block}.{name}.weight" for block in SIZES for name in ("down", "up")}
FROZEN = {f"{block}.base.{name}" for block in SIZES for name in ("weight", "bias")}


class Adapted(nn.Module):
    """A frozen linear layer, and adapters of rank 2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> list[nn.Module]:
    return [Adapted(*SIZES[block]) if block in SIZES else nn.Tanh() for block in range(4)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    tensors = {name: p for name, p in nn.Sequential(*adapted()).state_dict().items() if name in FROZEN}
    safetensors.torch.save_file(tensors, path)
    return path


def load(path: Path) -> Callable[[nn.Module, int], None]:
    """The `init` of a block reads the block's values from the file."""

    def init(block: nn.Module, number: int) -> None:
        with safetensors.safe_open(path, "pt") as file:
            for name, parameter in block.named_parameters():
                if not parameter.requires_grad:
                    parameter.copy_(file.get_tensor(f"{number}.{name}"))

    return init


def staging(base: Path, *cuts: int) -> ModelStages:
    blueprint = Blueprint(adapted, seed=3, init=load(base))
    return ModelStages(blueprint, len(cuts) - 1, cuts=cuts, device=torch.device("cpu"))


def in_plain_torch(base: Path, batches: dict[int, Any]) -> tuple[dict[int, float], dict[str, Tensor]]:
    """The losses by step and the final model of an ordinary loop over the same batches in two parts."""
    model = nn.Sequential(*Blueprint(adapted, seed=3, init=load(base)).build(0, 4))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = {}
    for step, (inputs, targets) in sorted(batches.items()):
        optimizer.zero_grad()
        losses[step] = 0.0
        for x, y in zip(inputs.split(2), targets.split(2), strict=True):
            loss = loss_fn(model(x), y) * 0.5
            loss.backward()
            losses[step] += loss.item()
        optimizer.step()
    return losses, model.state_dict()


class Adapters(Workers):
    """Workers of which the one with stage 1 may be killed."""

    def __init__(self, folder: Path, base: Path, stages: int = 2, **options: Any) -> None:
        defaults = {
            "steps": STEPS,
            "checkpoint_every": 4,
            "model": adapted,
            "init": load(base),
            "stages": stages,
        }
        super().__init__(folder, stages, **(defaults | options))
        self.before, self.after = self._die, self._capture
        self.killed: list[str] = []
        self.captured: set[str] = set()  # the parameters in the states for newcomers
        self.kill_at = STEPS

    def _die(self, seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if pipe.stage == 1 and grid.step == self.kill_at and not self.killed:
            self.killed.append(seen.name)
            self.kill(seen.name)

    def _capture(self, seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        blobs = pipe.held.capture_state(grid._session.snapshot)
        if blobs is not None:
            self.captured |= serialization._parse_values(blobs)["parameters"].keys()

    def check(self, base: Path, before: dict[int, Any] | None = None) -> dict[int, Any]:
        """The run's losses and its final model are those of plain torch; returns the batches by step."""
        ended = [seen for seen in self.seen.values() if seen.end == "finished"]
        assert len(ended) == len(self.seen) - len(self.killed), [seen.end for seen in self.seen.values()]
        batches = dict(before or {})
        for seen in self.seen.values():
            batches |= seen.batches
        assert sorted(batches) == list(range(self.steps))
        assert self.captured == (TRAINED | FROZEN if "send_frozen" in self.options else TRAINED)
        losses, model = in_plain_torch(base, batches)
        state = {name: value for seen in ended for name, value in seen.state.items()}
        assert state.keys() == model.keys()
        assert all(torch.equal(value, model[name]) for name, value in state.items())
        assert all(seen.losses == {step: losses[step] for step in seen.losses} for seen in ended)
        return batches


def are_whole(folder: Path) -> bool:
    """Whether no checkpoint is being replaced or removed in the background."""
    return all((path / "state.json").exists() for path in folder.glob("*/blocks-*/step-*"))


def check_files(folder: Path) -> None:
    """Neither checkpoints nor the final model contain the base."""
    paths = list(folder.glob("*/blocks-*/step-*"))
    found = [checkpoint_store.read(path) for path in paths]
    assert found and {name for each in found for name in absent_names(each.document)} == FROZEN
    export_model(folder, folder / "whole.safetensors")
    assert set(safetensors.torch.load_file(folder / "whole.safetensors")) == TRAINED
    parts = [safetensors.torch.load_file(path) for path in folder.glob("final-*-of-*.safetensors")]
    assert {name for part in parts for name in part} == TRAINED
    index = json.loads((folder / "final.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == TRAINED


@pytest.mark.parametrize("how", ["a newcomer takes the stage", "two stages take its layers"])
def test_a_killed_stage_is_continued_with_adapters_from_checkpoints(
    tmp_path: Path, base: Path, how: str
) -> None:
    is_replaced = how == "a newcomer takes the stage"
    limits = LOSING if is_replaced else replace(LOSING, recut_s=0.5)
    with Adapters(tmp_path, base, 2 if is_replaced else 3, deadlines=limits) as workers:
        workers.kill_at = 11
        workers.add(*("anna", "bert", "clara")[: 2 if is_replaced else 3])
        workers.wait(lambda: bool(workers.killed))
        if is_replaced:
            workers.add("dora")  # with an empty disk
        workers.join(*workers.seen)  # the killed one, too, has ended all its work on the disk
        workers.check(base)
        workers.wait(lambda: are_whole(tmp_path))
    check_files(tmp_path)


@pytest.mark.parametrize("sends_all", [False, True], ids=["", "of-an-earlier-version"])
def test_a_run_continues_from_checkpoints(tmp_path: Path, base: Path, sends_all: bool) -> None:
    """Checkpoints of an earlier version contain the base."""
    batches: dict[int, Any] = {}
    for steps in (8, STEPS):
        options = {"send_frozen": "*"} if sends_all and steps == 8 else {}
        with Adapters(tmp_path, base, steps=steps, **options) as workers:
            workers.add("anna", "bert")
            workers.finish("anna", "bert")
            assert min(workers.seen["anna"].losses) == (8 if batches else 0), "the second run continues"
            batches = workers.check(base, batches)
    if not sends_all:
        check_files(tmp_path)


def changed(base: Path, folder: Path) -> Path:
    tensors = safetensors.torch.load_file(base)
    tensors["3.base.bias"] += 0.5
    safetensors.torch.save_file(tensors, folder / "other.safetensors")
    return folder / "other.safetensors"


def test_a_worker_with_another_base_is_refused_before_it_has_a_stage(tmp_path: Path, base: Path) -> None:
    digests = []
    for path in (base, changed(base, tmp_path)):
        stages = staging(path, 0, 2, 4)
        digests.append(FrozenBase(stages.whole, pieces=stages.frozen_blocks).describe())
    whole = nn.Sequential(*Blueprint(adapted, init=load(base)).build(0, 4))
    assert digests[0] == FrozenBase(whole).describe() != digests[1], "the partition does not matter"
    unread = FrozenBase(stages.whole, rule="any", pieces=lambda: pytest.fail("it is built"))
    assert unread.describe() == "420 B in 6 frozen tensors, digest unknown"
    with Adapters(tmp_path, base, checkpoint_every=0) as workers:
        workers.add("anna")
        workers.wait(lambda: "base" in workers.status()["facts"])
        workers.options["init"] = load(changed(base, tmp_path))
        workers.add("eve")
        workers.join("eve")
        refusal = workers.seen.pop("eve").end
        workers.options["init"] = load(base)
        workers.add("bert")
        workers.finish("anna", "bert")
        workers.check(base)
    assert isinstance(refusal, JoinRefused) and refusal.code == "different-run"
    assert f"base is {digests[1]} here and {digests[0]} in the run" in refusal.reason


def test_another_base_is_found_in_checkpoints_and_stages(base: Path, tmp_path: Path) -> None:
    """A checkpoint of an earlier version contains its base; `init` may draw new values each time."""
    stages = staging(base, 0, 4)
    module, held = stages.build(0)[0], FrozenBase(stages.whole, pieces=stages.frozen_blocks)
    held.digest()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    document, tensors = serialization.pack_state(module, inner, {})
    document["order"] = checkpoint_merge.parameter_order(module, inner)
    held.mark(module)
    held.check_unchanged(module)
    old = Checkpoint(CheckpointInfo(9, b"h", LedgerState(step=10)), (), document, tensors, {}, path=tmp_path)
    checkpoint_merge.load_merged([old], module, inner, {}, [])
    with torch.no_grad():
        module.blocks[3].base.bias += 0.5
    with pytest.raises(RemoteProtocolError, match=r"a different base: its frozen parameter '3\.base\.bias'"):
        checkpoint_merge.load_merged([old], module, inner, {}, [])
    with pytest.raises(ConfigError, match=r"such as '3\.base\.bias'"):
        held.check_unchanged(module)


def test_stages_do_not_exchange_tied_parameters_that_are_frozen() -> None:
    def tied(is_trained: bool) -> int:
        def model() -> list[nn.Module]:
            first, last = Adapted(4, 4), Adapted(4, 4)
            last.base.weight = first.base.weight.requires_grad_(is_trained)
            return [first, last]

        blueprint = Blueprint(model)
        return len(blueprint.tied_in(1, (0, 1, 2), blueprint.build(1, 2)))

    assert (tied(True), tied(False)) == (1, 0)
