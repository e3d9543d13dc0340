"""Groups that train adapters of a frozen base: what is sent and compared, and which workers are refused."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from absent_names import absent_names
from brisk import LOSING, WITHIN_S
from group_status import status_of
from threaded_group import ThreadedGroup
from torch import Tensor, nn

import gridtrain
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.runtime.heartbeat import STATE_MESSAGES
from gridtrain.training.checkpoint import checkpoint_store, serialization

WIDTH, RANK = 512, 64
SOME = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(40)]
DATA = [SOME[i % 40] for i in range(50_000)]
LOCAL = gridtrain.LocalSteps(every=2, exchange=gridtrain.GTopK(density=0.5))
EXCHANGES = {"dense": gridtrain.Dense(), "gtopk": gridtrain.GTopK(density=0.1, momentum=0.0), "local": LOCAL}


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).requires_grad_(
            False
        )
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.norm = nn.BatchNorm1d(RANK)
        self.up = nn.Linear(RANK, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.norm(self.down(x)))
        return result


torch.manual_seed(5)
MODEL = Adapted()


def other_base() -> Adapted:
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.base[2].bias.add_(1.0)
    return model


def trained_bytes(model: nn.Module, inner: torch.optim.Optimizer) -> int:
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = [x for state in inner.state.values() for x in state.values() if isinstance(x, Tensor)]
    return sum(x.nbytes for x in (*trained, *model.buffers(), *moments))


def received_state_bytes(grid: gridtrain.Grid) -> int:
    return sum(grid.traffic.get(kind, (0, 0))[1] for kind in STATE_MESSAGES)


@dataclass
class Run:
    """What the workers of one test do and observe.

    `digests`: by worker and step, the digest of the replicated state after the step.
    """

    exchange: Any
    steps: int = 100_000
    model: Callable[[], nn.Module] = field(default=lambda: copy.deepcopy(MODEL))
    options: dict[str, Any] = field(default_factory=dict)
    before_step: Callable[[gridtrain.Grid, nn.Module], Any] = lambda grid, model: None
    digests: dict[str, dict[int, bytes]] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)
    stop_at: int = 10**9
    changed: threading.Condition = field(default_factory=threading.Condition)

    failures: list[BaseException] = field(default_factory=list)

    def work(self, grid: gridtrain.Grid, _: Any = None) -> dict[str, Any]:
        try:
            return self.train(grid)
        except BaseException as error:
            with self.changed:
                self.failures.append(error)
                self.changed.notify_all()
            raise

    def train(self, grid: gridtrain.Grid) -> dict[str, Any]:
        model = self.model()
        inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.001)
        frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
        optimizer = grid.optimizer(
            inner, model, exchange=self.exchange, **{"compare_every": 10} | self.options
        )
        seen: dict[str, Any] = {"first": None}
        for x, y in grid.batches(DATA, batch_size=4, steps=self.steps):
            if seen["first"] is None:
                seen |= {"first": grid.step, "received_bytes": received_state_bytes(grid)}
                seen["start"] = {name: value.clone() for name, value in model.state_dict().items()}
            if grid.step >= self.stop_at:
                break
            self.before_step(grid, model)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.local_calls:
                continue
            with self.changed:
                digest = serialization.replica_digest(model, optimizer.replicated)
                self.digests.setdefault(grid._config.name, {})[grid.step] = digest
                self.changed.notify_all()
        return seen | {
            "is_base_kept": all(map(torch.equal, frozen, _frozen(model))),
            "bytes": received_state_bytes(grid),
            "trained_bytes": trained_bytes(model, optimizer.replicated),
        }

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.failures) or condition(), WITHIN_S)
        if self.failures:
            raise self.failures[0]

    def steps_of(self, name: str) -> int:
        return max(self.digests.get(name, {0: b""}))

    def check_equal(self, *names: str) -> None:
        """The workers had the same state after each step that they took together."""
        common = set.intersection(*(set(self.digests[name]) for name in names))
        assert len(common) > 5
        for step in common:
            assert len({self.digests[name][step] for name in names}) == 1, step


def _frozen(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters() if not p.requires_grad]


# -- what is sent ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:AdamW converges poorly")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_worker_that_joins_receives_only_trained_parameters(new_group: Any, exchange: str) -> None:
    """Its heartbeats report the received bytes."""
    run = Run(EXCHANGES[exchange])
    with new_group(workers=2) as group:
        group.start_all(run.work)
        run.wait_until(lambda: run.steps_of("worker-0") >= 8)
        group.start(run.work)
        run.wait_until(lambda: bool(run.digests.get("worker-2")))
        run.stop_at = run.steps_of("worker-0") + 40
        results = group.finish()
        figures = {member["name"]: member["figures"] for member in status_of(group)["members"]}
    joined = results[2]
    assert all(result["is_base_kept"] for result in results)
    assert joined["first"] > 0 and results[0]["bytes"] == 0
    base_bytes = sum(p.nbytes for p in _frozen(MODEL))
    print(f"{joined['received_bytes']} bytes received, {joined['trained_bytes']} trained, base {base_bytes}")
    assert 0 < joined["received_bytes"] <= 1.1 * joined["trained_bytes"] < base_bytes
    run.check_equal("worker-0", "worker-1", "worker-2")
    assert "state_bytes" not in figures.get("worker-0", {})


def test_the_base_is_not_sent_to_repair_a_divergence_or_after_a_loss(new_group: Any) -> None:
    """Three workers: one trained value diverges, later a worker is lost.  Neither sends the base."""
    run = Run(gridtrain.Dense(), steps=90)

    def trouble(grid: gridtrain.Grid, model: nn.Module) -> None:
        run.samples.append(grid.step)
        if (grid._config.name, grid.step) == ("worker-1", 13):
            with torch.no_grad():
                cast(Adapted, model).up.weight[0, 0] += 1.0
        if (grid._config.name, grid.step) == ("worker-2", 50):
            group.hub.kill(group.keys["worker-2"])

    run.before_step = trouble
    with new_group(workers=3, deadlines=LOSING) as group:
        group.start_all(run.work)
        results = group.ends()
        snapshot = status_of(group)
    assert isinstance(results[2], EndpointKilled)
    assert [(result["first"], result["is_base_kept"]) for result in results[:2]] == [(0, True)] * 2
    assert snapshot["drifts"] == 1 and snapshot["step"] == 90
    assert results[0]["bytes"] == 0 < results[1]["bytes"] <= 1.1 * results[1]["trained_bytes"]
    last = [max(run.digests[name].items()) for name in ("worker-0", "worker-1")]
    assert last[0] == last[1] and last[0][0] == 90


# -- what is compared ----------------------------------------------------------------------------------------


@pytest.fixture
def refused(new_group: Any) -> Callable[[Run, Run], JoinRefused]:
    """The first worker defines the run; returns the refusal of the second one."""

    def run(one: Run, other: Run) -> JoinRefused:
        over = threading.Event()
        one.before_step = lambda grid, model: over.wait(WITHIN_S) if grid.step == 3 else None
        with new_group(workers=1) as group:
            group.start(one.work)
            one.wait_until(lambda: one.steps_of("worker-0") == 3)
            error = group.result(group.start(other.work))
            over.set()
            assert not isinstance(group.result(0), BaseException), "the run goes on"
        assert isinstance(error, JoinRefused), error
        return error

    return run


@pytest.fixture
def together(new_group: Any) -> Callable[[Run, Run], Any]:
    """The second worker joins the first one; returns its result, and the status while both train."""

    def run(one: Run, other: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        with new_group(workers=1) as group:
            group.start(one.work)
            one.wait_until(lambda: one.steps_of("worker-0") > 3)
            group.start(other.work)
            other.wait_until(lambda: bool(other.digests))
            snapshot = status_of(group)
            one.stop_at = other.stop_at = max(one.steps_of("worker-0"), other.steps_of("worker-1")) + 30
            results = group.finish()
        one.digests |= other.digests
        one.check_equal("worker-0", "worker-1")
        return results[1], snapshot

    return run


def test_a_worker_with_another_base_is_refused_with_both_digests(refused: Any) -> None:
    error = refused(Run(gridtrain.Dense(), steps=5), Run(gridtrain.Dense(), steps=5, model=other_base))
    assert isinstance(error, JoinRefused) and error.code == "different-run"
    described = r"1\.06 MB in 4 frozen tensors, digest [0-9a-f]{12}"
    assert re.search(rf": base is {described} here and {described} in the run$", error.reason), error.reason
    assert error.remedy.startswith("load the same base model as the other workers")
    assert 'base="any" on all workers' in error.remedy and "send_frozen=" in error.remedy


def test_a_single_worker_cannot_allow_any_base(refused: Any) -> None:
    loose = {"base": "any"}
    error = refused(
        Run(gridtrain.Dense(), steps=5), Run(gridtrain.Dense(), steps=5, model=other_base, options=loose)
    )
    assert isinstance(error, JoinRefused) and "base is any here and 1.06 MB in" in error.reason
    assert "base= must be the same on all of them" in error.remedy


def rounded_base() -> Adapted:
    model = copy.deepcopy(MODEL)
    model.base.to(torch.bfloat16).register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    model.base.register_forward_hook(lambda module, inputs, result: result.float())
    return model


def test_differently_rounded_bases_train_together_on_request(together: Any) -> None:
    loose = {"base": "any"}
    other = Run(gridtrain.Dense(), options=loose, model=rounded_base)
    result, snapshot = together(Run(gridtrain.Dense(), options=loose), other)
    assert result["is_base_kept"] and result["start"]["base.0.weight"].dtype == torch.bfloat16
    assert snapshot["facts"]["base"] == "any"
    bases = {member["name"]: member["about"]["base"] for member in snapshot["members"]}
    assert bases["worker-0"].startswith("1.06 MB in") and bases["worker-1"].startswith("529 kB in")


def test_named_frozen_values_are_sent(together: Any) -> None:
    named = {"send_frozen": ["base.2.*"]}
    other = Run(gridtrain.Dense(), options=named, model=other_base)
    result, snapshot = together(Run(gridtrain.Dense(), options=named), other)
    assert not result["is_base_kept"], "the named values are the group's"
    assert torch.equal(result["start"]["base.2.bias"], MODEL.base[2].bias)
    assert " in 2 frozen tensors, digest " in snapshot["facts"]["base"]


def test_a_script_that_changes_frozen_parameters_is_refused(new_group: Any) -> None:
    """For example a momentum encoder, which a joining worker would not receive."""
    run = Run(gridtrain.Dense(), steps=9)

    def moves(grid: gridtrain.Grid, model: nn.Module) -> None:
        with torch.no_grad():
            cast(Adapted, model).base[0].weight.mul_(0.99)

    run.before_step = moves
    with new_group(workers=1) as group:
        group.start(run.work)
        error = group.result(0)
    assert isinstance(error, ConfigError) and "changed after the worker joined" in error.reason


# -- checkpoints ---------------------------------------------------------------------------------------------


def resume(folder: Path, run: Run) -> dict[str, Any]:
    with ThreadedGroup(folder, workers=1) as group:
        group.start(run.work, checkpoint_every=3, state_dir=str(folder / "state"))
        (result,) = group.finish()
        return result


def wait_for_disk(grid: gridtrain.Grid, model: nn.Module) -> None:
    grid._model_state.checkpoints.wait()  # type: ignore[union-attr]


def test_checkpoints_and_the_exported_file_lack_the_base(tmp_path: Path) -> None:
    run = Run(gridtrain.Dense(), stop_at=8, before_step=wait_for_disk)
    whole = resume(tmp_path, run)
    path = tmp_path / "state" / "step-00000006"
    checkpoint = checkpoint_store.read(path)
    frozen = [name for name, p in MODEL.named_parameters() if not p.requires_grad]
    assert absent_names(checkpoint.document) == frozen
    assert (path / "tensors.safetensors").stat().st_size <= 1.1 * whole["trained_bytes"]
    assert dict(checkpoint.facts)["base"].startswith("1.06 MB in 4 frozen tensors, digest ")

    again = resume(tmp_path, Run(run.exchange, stop_at=8))
    assert again["first"] == 8
    run.stop_at, run.steps, run.digests = 10**9, 12, {}
    assert resume(tmp_path, run)["first"] == 8 and run.steps_of("worker-0") == 12
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert sorted(exported) == sorted(name for name in MODEL.state_dict() if name not in frozen)


def test_a_base_that_changes_at_the_end_costs_the_checkpoint_but_not_the_final_model(tmp_path: Path) -> None:
    run = Run(gridtrain.Dense(), steps=9)

    def moves_at_the_end(grid: gridtrain.Grid, model: nn.Module) -> None:
        if grid.step == 8:
            with torch.no_grad():
                cast(Adapted, model).base[0].weight.mul_(0.99)

    run.before_step = moves_at_the_end
    with pytest.raises(ConfigError, match="changed after the worker joined"):
        resume(tmp_path, run)
    assert (tmp_path / "final.safetensors").exists()


def test_a_checkpoint_of_another_base_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resume(tmp_path, Run(gridtrain.Dense(), stop_at=8, before_step=wait_for_disk))
    with pytest.raises(ConfigError, match="undo the change"):
        resume(tmp_path, Run(gridtrain.Dense(), stop_at=2, model=other_base))
    assert re.search(r"training settings \(base: 1\.06 MB in 4 frozen .*\) and will not be", caplog.text)


@pytest.mark.parametrize("model", [lambda: copy.deepcopy(MODEL), other_base], ids=["same", "other"])
def test_a_checkpoint_of_an_earlier_version_contains_the_base(tmp_path: Path, model: Any) -> None:
    """It has no fact about the base; its values are compared with those of the script."""
    old = Run(gridtrain.Dense(), stop_at=8, before_step=wait_for_disk, options={"send_frozen": "*"})
    resume(tmp_path, old)
    checkpoint = checkpoint_store.read(tmp_path / "state" / "step-00000008")
    assert "base" not in dict(checkpoint.facts) and absent_names(checkpoint.document) == []
    run = Run(gridtrain.Dense(), stop_at=10, model=model)
    if model is not other_base:
        assert resume(tmp_path, run)["first"] == 8
        return
    with pytest.raises(ConfigError, match=r"step-00000008 of step 8 cannot be used: .* a different base"):
        resume(tmp_path, run)
