"""A broken line, a model that fails, and bytes that were not agreed: every stage raises at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_stage_link import MemoryStageLink, memory_stage_links
from pipeline_models import (
    Block,
    largest_difference,
    layers_of,
    loss_of,
    result_of,
    run,
    stages_of,
    tokens,
    unpartitioned,
)
from torch import Tensor, nn

from gridtrain.core.messages import Channel
from gridtrain.core.stages import schedule as plan
from gridtrain.core.stages.schedule import fill_drain
from gridtrain.errors import ConfigError, LineBroken, LocalProtocolError
from gridtrain.pipeline import executor
from gridtrain.pipeline.executor import (
    PayloadBuffers,
    ScheduleFactory,
    StageExecutor,
    StepResult,
    share_tied_parameters,
)
from gridtrain.pipeline.stage import Stage

SIZES = (2, 2, 2, 2)


def every_stage(stages: Sequence[Stage], lines: Sequence[MemoryStageLink]) -> list[BaseException | None]:
    """What each stage raised, all running at once; waits for all of them."""
    raised: list[BaseException | None] = [None] * len(stages)
    inputs, targets = tokens(sum(SIZES))

    def work(s: int) -> None:
        try:
            StageExecutor(stages[s], s, len(stages)).run(
                lines[s], seed=1, sizes=SIZES, inputs=inputs, targets=targets
            )
        except Exception as error:
            raised[s] = error

    threads = [threading.Thread(target=work, args=(s,)) for s in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class Tampering:
    """A line that does something with the `at`-th payload that it is given to send."""

    def __init__(
        self, line: MemoryStageLink, at: int, act: Callable[[PayloadBuffers], PayloadBuffers]
    ) -> None:
        self._line, self._left, self._act = line, at, act

    def send(self, stage: int, channel: Channel, buffers: PayloadBuffers) -> None:
        self._left -= 1
        self._line.send(stage, channel, self._act(buffers) if self._left == -1 else buffers)

    def receive(self, stage: int, channel: Channel) -> PayloadBuffers:
        return self._line.receive(stage, channel)

    def abort(self, reason: str) -> None:
        self._line.abort(reason)


class Dead(Exception):
    pass


def die(buffers: PayloadBuffers) -> PayloadBuffers:
    raise Dead


# each stage in the middle of 4 sends 4 activations and 4 gradients; the ends send 4 payloads
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_a_stage_that_dies_is_known_to_all_and_no_gradient_is_left(stage: int, at: int) -> None:
    stages = stages_of(layers_of(), 4)
    marks = [torch.full_like(p, 7.0) for p in stages[stage].parameters]
    for parameter, mark in zip(stages[stage].parameters, marks, strict=True):
        parameter.grad = mark
    lines: list = list(memory_stage_links(4))
    lines[stage] = Tampering(lines[stage], at, die)
    raised = every_stage(stages, lines)
    for s, error in enumerate(raised):
        if s == stage:
            assert isinstance(error, Dead)
        else:
            assert isinstance(error, LineBroken)
            assert (error.peer, error.reason) == (stage, f"stage {stage}: Dead: ")
    for s, one in enumerate(stages):
        assert not one._kept
        expected = marks if s == stage else [None] * len(one.parameters)
        assert all(p.grad is mark for p, mark in zip(one.parameters, expected, strict=True))


def test_after_a_broken_line_the_step_is_repeated_as_if_nothing_had_been() -> None:
    layers = layers_of(dropout=True, batch_norm=True)
    stages, untouched = stages_of(layers, 4), stages_of(layers, 4)
    lines: list = list(memory_stage_links(4))
    lines[2] = Tampering(lines[2], 5, die)
    assert all(every_stage(stages, lines))
    got, expected = result_of(stages, run(stages, SIZES)), result_of(untouched, run(untouched, SIZES))
    assert all(torch.equal(got.gradients[name], g) for name, g in expected.gradients.items())
    for stage in [*stages, *untouched]:
        stage.commit()
    assert all(torch.equal(got.buffers[name], b) for name, b in expected.buffers.items())


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise MemoryError("no memory left")


def test_what_the_model_raises_comes_out_where_it_was_and_breaks_the_others() -> None:
    stages = stages_of(layers_of(), 3)
    stages[1].layers[-1] = Failing()
    raised = every_stage(stages, memory_stage_links(3))
    assert isinstance(raised[1], MemoryError)
    for other in (raised[0], raised[2]):
        assert isinstance(other, LineBroken) and other.reason == "stage 1: MemoryError: no memory left"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda buffers: buffers[:-1], "got 4 buffers; expected 5"),
        (lambda buffers: [*buffers, memoryview(b"")], "got 6 buffers; expected 5"),
        (lambda buffers: [buffers[0][:-1], *buffers[1:]], "buffer 0 has 239 bytes; expected 240"),
        (
            lambda buffers: [memoryview(bytes(b"\x07" * b.nbytes)) for b in buffers],
            "a boolean is encoded as 7; it must be 0 or 1",
        ),
    ],
)
def test_bytes_that_were_not_agreed_are_refused_and_everybody_knows_whose(
    act: Callable[[PayloadBuffers], PayloadBuffers], text: str
) -> None:
    stages = stages_of(layers_of(), 3)
    lines: list = list(memory_stage_links(3))
    lines[0] = Tampering(lines[0], 1, act)
    raised = every_stage(stages, lines)
    assert isinstance(raised[1], LineBroken) and raised[1].peer == 0 and text in raised[1].reason
    assert all(isinstance(error, LineBroken) and text in error.reason for error in raised)


def test_a_stage_that_waits_for_what_never_comes_hears_of_an_abort() -> None:
    lines = memory_stage_links(3)
    waiting = threading.Event()
    raised: list[LineBroken] = []

    def wait(stage: int) -> None:
        waiting.set()
        with pytest.raises(LineBroken) as caught:
            lines[stage].receive(1, plan.activations_channel(0))
        raised.append(caught.value)

    threads = [threading.Thread(target=wait, args=(stage,)) for stage in (0, 2)]
    for thread in threads:
        thread.start()
    waiting.wait()
    lines[1].abort("stage 1 leaves")
    lines[1].abort("another reason")
    for thread in threads:
        thread.join()
    assert [(error.reason, error.peer) for error in raised] == [("stage 1 leaves", 1)] * 2
    with pytest.raises(LineBroken, match="stage 1 leaves"):
        lines[0].send(1, plan.activations_channel(0), [])


def test_a_memory_line_says_one_thing_once_and_in_any_order() -> None:
    lines = memory_stage_links(2, latency_s=1e-4, bandwidth_Bps=1e9)
    for m in range(3):
        lines[0].send(1, plan.activations_channel(m), [memoryview(bytes([m])), memoryview(b"")])
    with pytest.raises(LocalProtocolError, match="again"):
        lines[0].send(1, plan.activations_channel(2), [])
    for m in (2, 0, 1):
        assert [bytes(b) for b in lines[1].receive(0, plan.activations_channel(m))] == [bytes([m]), b""]


def test_stages_made_for_another_place_are_refused() -> None:
    stages = stages_of(layers_of(), 3)
    with pytest.raises(ConfigError, match="pass `input` to every stage except the first"):
        StageExecutor(stages[1], 0, 3)
    with pytest.raises(ConfigError, match="and `output` to all but the last"):
        StageExecutor(stages[2], 1, 3)
    with pytest.raises(ConfigError, match=r"exactly one of loss= and output="):
        Stage([nn.Linear(2, 2)])


class Overwriting(nn.Module):
    def __init__(self, block: Block, act: Callable[[dict], object]) -> None:
        super().__init__()
        self.block, self.act = block, act

    def forward(self, nest: dict) -> dict:
        self.act(nest)
        return self.block(nest)


@pytest.mark.parametrize("schedule", [plan.fill_drain, plan.one_forward_one_backward])
def test_a_stage_s_first_layer_may_overwrite_activations(schedule: ScheduleFactory) -> None:
    layers = layers_of()
    layers[5] = Overwriting(layers[5], lambda nest: nest["x"].mul_(2.0))  # the second stage's first
    stages = stages_of(layers, 2)
    got = result_of(stages, run(stages, (2, 2), schedule=schedule))
    assert largest_difference(got, unpartitioned(layers, (2, 2))) == 0.0


def test_a_layer_that_overwrites_what_is_needed_once_more_is_refused() -> None:
    layers = layers_of()
    layers[5] = Overwriting(layers[5], lambda nest: nest["side"][1][0].logical_not_())
    with pytest.raises(ConfigError, match="inplace=False in this layer"):
        run(stages_of(layers, 2), (2, 2), schedule=plan.fill_drain)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")

    with pytest.raises(ConfigError, match=r"the loss is \(10,\)"):
        run(stages_of(layers_of(), 2, loss=loss), (2, 2))
    assert loss_of(torch.zeros(5, 11), torch.zeros(1, 5, dtype=torch.int64)).dim() == 0


def test_tied_parameters_follow_the_lowest_stage_bit_for_bit() -> None:
    stages, lines = stages_of(layers_of(tied=True), 3), memory_stage_links(3)
    run(stages, (2, 2))
    first, last = stages[0].tied[0].parameter, stages[2].tied[0].parameter
    with torch.no_grad():
        first.sub_(first.grad)
        last.add_(1.0)
    for number in (0, 1, 2):
        share_tied_parameters(stages[number], number, lines[number])
    assert torch.equal(first, last)


def of_one(loss: Any, **options: Any) -> Stage:
    return Stage([nn.Linear(2, 1)], loss=loss, **options)


def run_alone(stage: Stage, inputs: torch.Tensor, targets: torch.Tensor) -> StepResult:
    given = {"seed": 1, "sizes": (1,) * len(inputs), "inputs": inputs, "targets": targets}
    alone = StageExecutor(stage, 0, 1, schedule=fill_drain)
    return alone.run(memory_stage_links(1)[0], **given)  # type: ignore[arg-type]


def test_a_loss_without_a_gradient_is_refused() -> None:
    stage = of_one(lambda output, targets: torch.tensor(float((output - targets).square().mean())))
    with pytest.raises(ConfigError, match="the loss has no gradient"):
        run_alone(stage, torch.ones(2, 2), torch.ones(2, 1))


def test_a_step_under_no_grad_trains_all_the_same() -> None:
    stage = of_one(nn.functional.mse_loss)
    with torch.no_grad():
        run_alone(stage, torch.ones(2, 2), torch.full((2, 1), 9.0))
    assert stage.parameters[0].grad is not None and bool(stage.parameters[0].grad.abs().sum() > 0)


def test_a_loss_that_overwrites_its_targets_does_so_with_a_copy() -> None:
    targets = torch.ones(2, 1)
    stage = of_one(lambda output, targets: nn.functional.mse_loss(output, targets.sub_(1)))
    run_alone(stage, torch.ones(2, 2), targets)
    assert targets.flatten().tolist() == [1.0, 1.0], "the next attempt needs them"


class Shifts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 1
        return x


def test_the_batch_is_not_overwritten_where_nothing_is_computed_anew() -> None:
    stage = Stage([Shifts(), nn.Linear(2, 1)], loss=nn.functional.mse_loss, rematerialise=False)
    with pytest.raises(ConfigError, match="overwrote its input"):
        run_alone(stage, torch.ones(2, 2), torch.ones(2, 1))


def test_a_micro_batch_takes_until_the_device_has_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU only queues the work: a clock that is read at once would make micro-batches look cheap."""
    clock_s = [0.0]

    def finish(device: torch.device) -> None:
        clock_s[0] += 2.0

    monkeypatch.setattr(executor, "finish_queued_work", finish)
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    result = run_alone(of_one(nn.functional.mse_loss), torch.ones(2, 2), torch.ones(2, 1))
    assert (result.forward_s, result.backward_s, result.computed_s) == (2.0, 2.0, 8.0)  # two of one sample
