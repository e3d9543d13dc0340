"""A broken link, a model that fails, and bytes that do not match the spec: every stage raises at once."""

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


def every_stage(stages: Sequence[Stage], links: Sequence[MemoryStageLink]) -> list[BaseException | None]:
    """Run all stages at once; return the exception of each."""
    raised: list[BaseException | None] = [None] * len(stages)
    inputs, targets = tokens(sum(SIZES))

    def work(s: int) -> None:
        try:
            StageExecutor(stages[s], s, len(stages)).run(
                links[s], seed=1, sizes=SIZES, inputs=inputs, targets=targets
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
    """A link that calls `act` with the `at`-th payload to send."""

    def __init__(
        self, link: MemoryStageLink, at: int, act: Callable[[PayloadBuffers], PayloadBuffers]
    ) -> None:
        self._link, self._left, self._act = link, at, act

    def send(self, stage: int, channel: Channel, buffers: PayloadBuffers) -> None:
        self._left -= 1
        self._link.send(stage, channel, self._act(buffers) if self._left == -1 else buffers)

    def receive(self, stage: int, channel: Channel) -> PayloadBuffers:
        return self._link.receive(stage, channel)

    def abort(self, reason: str) -> None:
        self._link.abort(reason)


class Dead(Exception):
    pass


def die(buffers: PayloadBuffers) -> PayloadBuffers:
    raise Dead


# each stage in the middle of 4 sends 4 activations and 4 gradients; the ends send 4 payloads
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_all_stages_learn_of_a_dead_one_and_no_gradient_is_left(stage: int, at: int) -> None:
    stages = stages_of(layers_of(), 4)
    marks = [torch.full_like(p, 7.0) for p in stages[stage].parameters]
    for parameter, mark in zip(stages[stage].parameters, marks, strict=True):
        parameter.grad = mark
    links: list = list(memory_stage_links(4))
    links[stage] = Tampering(links[stage], at, die)
    raised = every_stage(stages, links)
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


def test_after_a_broken_link_the_repeated_step_has_the_same_result() -> None:
    layers = layers_of(dropout=True, batch_norm=True)
    stages, untouched = stages_of(layers, 4), stages_of(layers, 4)
    links: list = list(memory_stage_links(4))
    links[2] = Tampering(links[2], 5, die)
    assert all(every_stage(stages, links))
    got, expected = result_of(stages, run(stages, SIZES)), result_of(untouched, run(untouched, SIZES))
    assert all(torch.equal(got.gradients[name], g) for name, g in expected.gradients.items())
    for stage in [*stages, *untouched]:
        stage.commit()
    assert all(torch.equal(got.buffers[name], b) for name, b in expected.buffers.items())


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise MemoryError("no memory left")


def test_an_exception_of_the_model_is_raised_in_its_stage_and_breaks_the_links() -> None:
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
def test_bytes_that_do_not_match_the_spec_are_refused_and_all_know_the_sender(
    act: Callable[[PayloadBuffers], PayloadBuffers], text: str
) -> None:
    stages = stages_of(layers_of(), 3)
    links: list = list(memory_stage_links(3))
    links[0] = Tampering(links[0], 1, act)
    raised = every_stage(stages, links)
    assert isinstance(raised[1], LineBroken) and raised[1].peer == 0 and text in raised[1].reason
    assert all(isinstance(error, LineBroken) and text in error.reason for error in raised)


def test_an_abort_wakes_a_waiting_stage() -> None:
    links = memory_stage_links(3)
    waiting = threading.Event()
    raised: list[LineBroken] = []

    def wait(stage: int) -> None:
        waiting.set()
        with pytest.raises(LineBroken) as caught:
            links[stage].receive(1, plan.activations_channel(0))
        raised.append(caught.value)

    threads = [threading.Thread(target=wait, args=(stage,)) for stage in (0, 2)]
    for thread in threads:
        thread.start()
    waiting.wait()
    links[1].abort("stage 1 leaves")
    links[1].abort("another reason")
    for thread in threads:
        thread.join()
    assert [(error.reason, error.peer) for error in raised] == [("stage 1 leaves", 1)] * 2
    with pytest.raises(LineBroken, match="stage 1 leaves"):
        links[0].send(1, plan.activations_channel(0), [])


def test_a_memory_link_delivers_each_payload_once_and_in_any_order() -> None:
    links = memory_stage_links(2, latency_s=1e-4, bandwidth_Bps=1e9)
    for m in range(3):
        links[0].send(1, plan.activations_channel(m), [memoryview(bytes([m])), memoryview(b"")])
    with pytest.raises(LocalProtocolError, match="again"):
        links[0].send(1, plan.activations_channel(2), [])
    for m in (2, 0, 1):
        assert [bytes(b) for b in links[1].receive(0, plan.activations_channel(m))] == [bytes([m]), b""]


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


def test_a_layer_that_overwrites_a_value_that_is_still_needed_is_refused() -> None:
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


def test_tied_parameters_are_those_of_the_lowest_stage_bit_for_bit() -> None:
    stages, links = stages_of(layers_of(tied=True), 3), memory_stage_links(3)
    run(stages, (2, 2))
    first, last = stages[0].tied[0].parameter, stages[2].tied[0].parameter
    with torch.no_grad():
        first.sub_(first.grad)
        last.add_(1.0)
    for number in (0, 1, 2):
        share_tied_parameters(stages[number], number, links[number])
    assert torch.equal(first, last)


def of_one(loss: Any, **options: Any) -> Stage:
    return Stage([nn.Linear(2, 1)], loss=loss, **options)


def run_alone(stage: Stage, inputs: torch.Tensor, targets: torch.Tensor) -> StepResult:
    arguments = {"seed": 1, "sizes": (1,) * len(inputs), "inputs": inputs, "targets": targets}
    alone = StageExecutor(stage, 0, 1, schedule=fill_drain)
    return alone.run(memory_stage_links(1)[0], **arguments)  # type: ignore[arg-type]


def test_a_loss_without_a_gradient_is_refused() -> None:
    stage = of_one(lambda output, targets: torch.tensor(float((output - targets).square().mean())))
    with pytest.raises(ConfigError, match="the loss has no gradient"):
        run_alone(stage, torch.ones(2, 2), torch.ones(2, 1))


def test_a_step_under_no_grad_computes_gradients() -> None:
    stage = of_one(nn.functional.mse_loss)
    with torch.no_grad():
        run_alone(stage, torch.ones(2, 2), torch.full((2, 1), 9.0))
    assert stage.parameters[0].grad is not None and bool(stage.parameters[0].grad.abs().sum() > 0)


def test_a_loss_that_overwrites_its_targets_receives_a_copy() -> None:
    targets = torch.ones(2, 1)
    stage = of_one(lambda output, targets: nn.functional.mse_loss(output, targets.sub_(1)))
    run_alone(stage, torch.ones(2, 2), targets)
    assert targets.flatten().tolist() == [1.0, 1.0], "the next attempt needs the targets"


class Shifts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 1
        return x


def test_overwriting_the_batch_is_refused_without_rematerialisation() -> None:
    stage = Stage([Shifts(), nn.Linear(2, 1)], loss=nn.functional.mse_loss, rematerialise=False)
    with pytest.raises(ConfigError, match="overwrote its input"):
        run_alone(stage, torch.ones(2, 2), torch.ones(2, 1))


def test_a_micro_batch_is_timed_until_the_device_has_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU only queues the work: a clock that is read at once would show too short a time."""
    clock_s = [0.0]

    def finish(device: torch.device) -> None:
        clock_s[0] += 2.0

    monkeypatch.setattr(executor, "finish_queued_work", finish)
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    result = run_alone(of_one(nn.functional.mse_loss), torch.ones(2, 2), torch.ones(2, 1))
    assert (result.forward_s, result.backward_s, result.computed_s) == (2.0, 2.0, 8.0)  # two of one sample
