"""Ordinary training loops do the same in a group as in one process with the whole batch.

Every loop runs twice, unchanged: over `OneProcess`, which is the script without gridtrain, and over real
grids of three workers.  With a dense exchange both must learn the same (to float32 summation order); with any
exchange all workers must have the same bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training_loop import digest, flat

import gridtrain
from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint.joint_optimizer import as_one
from gridtrain.training.data import sampler

WORKERS = 3
DENSE, SPARSE = gridtrain.Dense(), gridtrain.GTopK(density=0.3, momentum=0.9)

Sample = tuple[torch.Tensor, torch.Tensor]
Loop = Callable[[Any, gridtrain.Dense | gridtrain.GTopK], tuple[nn.Module, Any]]
"""(grid, exchange) -> (model, optimizer) at the end of the run."""


class OneProcess:
    """The calls of a grid, without a group: each step takes the samples of `WORKERS` workers."""

    def optimizer(self, inner: torch.optim.Optimizer, model: nn.Module, **_: Any) -> torch.optim.Optimizer:
        return as_one(inner)  # type: ignore[no-any-return]

    def scaler(self, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(**options)

    def mean(self, value: torch.Tensor) -> float:
        return value.item()

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        **sizes: int,
    ) -> Iterator[Any]:
        """Batches in the ledger's order; a pass ends with a short step."""
        spec = LedgerSpec(size=len(dataset), seed=seed, epochs=epochs, steps=steps)
        whole = sizes.get("global_batch_size") or sizes["batch_size"] * WORKERS * accumulate
        cursor = step = 0
        while step < steps if steps is not None else cursor < spec.size * (epochs or 0):
            stop = min(cursor + whole, (cursor // spec.size + 1) * spec.size)
            indices = sampler.sample_indices(spec, [Span(cursor, stop)])
            for part in range(accumulate):
                yield sampler.fetch_batch(dataset, indices[part::accumulate])
            cursor, step = stop, step + 1

    def sampler(self, dataset: Any, **options: Any) -> Iterator[list[int]]:
        for batch in self.batches(range(len(dataset)), **options):
            yield batch.tolist()


# -- a model and data that are the same in every thread ----------------------------------------------


def noisy_sums(size: int = 24, seed: int = 7) -> list[Sample]:
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=source)
    noise = 0.1 * torch.randn(size, 1, generator=source)
    return list(zip(inputs, inputs.sum(dim=1, keepdim=True) + noise, strict=True))


def seeded(model: nn.Sequential, seed: int = 1) -> nn.Sequential:
    """Parameters from a generator of their own: threads share the global one."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=source))
    return model


def net() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))


def sgd(parameters: Any, exchange: Any, **options: Any) -> torch.optim.Optimizer:
    """SGD with momentum; a sparse exchange has its own."""
    momentum = 0.9 if exchange is DENSE else 0.0
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": momentum, **options})


def error_of(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    inputs, targets = batch
    loss: torch.Tensor = (model(inputs) - targets).square().mean()
    return loss


DATA, HELD_OUT = noisy_sums(), noisy_sums(8, seed=8)


def wrapped(grid: Any, exchange: Any) -> tuple[nn.Sequential, Any]:
    """A net with its optimizer."""
    model = net()
    return model, grid.optimizer(sgd(model.parameters(), exchange), model, exchange=exchange)


def train(model: Callable[..., Any], optimizer: Any, batches: Iterable[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        error_of(model, batch).backward()
        optimizer.step()


# -- the loops -----------------------------------------------------------------------------------------


def plain(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrapped(grid, exchange)
    train(model, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    return model, optimizer


def passes_with_a_tail(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """20 samples, 3 workers of 4 each: steps of 12, 8, 12, 8 samples."""
    model, optimizer = wrapped(grid, exchange)
    train(model, optimizer, grid.batches(DATA[:20], batch_size=4, epochs=2, seed=3))
    return model, optimizer


def fewer_samples_than_workers(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """2 samples: a third worker gets placeholders, which do not count."""
    model, optimizer = wrapped(grid, exchange)
    train(model, optimizer, grid.batches(DATA[:2], batch_size=1, epochs=5))
    return model, optimizer


def global_batch_size(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """8 samples a step: shares of 3, 3 and 2."""
    model, optimizer = wrapped(grid, exchange)
    train(model, optimizer, grid.batches(DATA, global_batch_size=8, steps=6))
    return model, optimizer


def accumulation(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrapped(grid, exchange)
    batches = grid.batches(DATA, batch_size=2, accumulate=2, steps=6)
    for number, batch in enumerate(batches):
        (error_of(model, batch) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def data_loader(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrapped(grid, exchange)
    train(model, optimizer, DataLoader(DATA, batch_sampler=grid.sampler(DATA, batch_size=2, epochs=2)))  # type: ignore[arg-type]
    return model, optimizer


def lambda_scheduler(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrapped(grid, exchange)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for batch in grid.batches(DATA, batch_size=2, steps=6):
        optimizer.zero_grad()
        error_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 64
    return model, optimizer


def plateau_on_a_shared_number(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """The same held-out samples on every worker: the same number, so that no learning rate differs."""
    model, optimizer = wrapped(grid, exchange)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    held_out = sampler.fetch_batch(HELD_OUT, range(len(HELD_OUT)))
    for batch in grid.batches(DATA, batch_size=2, steps=6):
        optimizer.zero_grad()
        error_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            scheduler.step(error_of(model, held_out))
    assert optimizer.param_groups[0]["lr"] < 0.05
    return model, optimizer


def plateau_on_the_groups_mean(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """Every worker has the loss of its own samples; `grid.mean` makes it one number."""
    model, optimizer = wrapped(grid, exchange)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for batch in grid.batches(DATA, batch_size=2, steps=6):
        optimizer.zero_grad()
        loss = error_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step(grid.mean(loss))
    assert optimizer.param_groups[0]["lr"] < 0.05
    return model, optimizer


def adamw(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = grid.optimizer(optimizer, model, exchange=DENSE)
    train(model, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    return model, optimizer


def parameter_groups(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]
    optimizer = grid.optimizer(sgd(groups, exchange, weight_decay=0.01), model, exchange=exchange)
    train(model, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    return model, optimizer


def two_optimizers(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """Each of them has its own scheduler; after the third step their state is loaded."""
    model = net()
    inner = sgd(model[0].parameters(), exchange), torch.optim.Adagrad(model[2].parameters(), lr=0.02)
    optimizer = grid.optimizer(inner, model, exchange=exchange)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in inner]
    scaler = grid.scaler(device="cpu", init_scale=256.0, growth_interval=2)
    for number, batch in enumerate(grid.batches(DATA, batch_size=2, steps=6)):
        optimizer.zero_grad()
        scaler.scale(error_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        for each in schedulers:
            each.step()
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.05 * 0.9**6, 0.02 * 0.9**6])
    return model, optimizer


def alternating_updates(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """A generator and a discriminator, one of which is updated in each step."""
    model = nn.ModuleList([seeded(nn.Sequential(nn.Linear(4, 4))), seeded(nn.Sequential(nn.Linear(4, 1)))])
    generator, discriminator = model
    inner = [torch.optim.AdamW(model[0].parameters(), lr=0.01), sgd(model[1].parameters(), DENSE)]
    optimizer = grid.optimizer(inner, model, exchange=DENSE, unused="skip")
    scaler = grid.scaler(device="cpu", init_scale=256.0)
    for number, (inputs, _) in enumerate(grid.batches(DATA, batch_size=2, steps=6)):
        before = flat(model[number % 2])
        optimizer.zero_grad()
        if number % 2:
            loss = discriminator(generator(inputs)).square().mean()
            scaler.scale(loss).backward(inputs=list(generator.parameters()))
        else:
            made = generator(inputs).detach()
            scaler.scale((discriminator(made) - discriminator(inputs)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model[number % 2])), "the other one has no gradient"
    return model, optimizer


def frozen_parameters(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = grid.optimizer(sgd(model.parameters(), exchange), model, exchange=exchange)
    train(model, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    assert torch.equal(before, model[0].weight)
    return model, optimizer


def tied_parameters(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)))
    model[2].weight = model[0].weight
    optimizer = grid.optimizer(sgd(model.parameters(), exchange), model, exchange=exchange)
    train(model, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    assert model[2].weight is model[0].weight
    return model, optimizer


def compiled(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrapped(grid, exchange)
    fast = torch.compile(model, backend="eager")
    train(fast, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    return model, optimizer


def compiled_before_it_is_wrapped(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model = torch.compile(net(), backend="eager")
    optimizer = grid.optimizer(sgd(model.parameters(), exchange), model, exchange=exchange)
    train(model, optimizer, grid.batches(DATA, batch_size=2, steps=6))
    return model, optimizer


def scaled_loss(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrapped(grid, exchange)
    scaler = grid.scaler(device="cpu", init_scale=256.0, growth_interval=2)
    for batch in grid.batches(DATA, batch_size=2, steps=6):
        optimizer.zero_grad()
        scaler.scale(error_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 256.0 * 2**3
    return model, optimizer


def saved_and_loaded(grid: Any, exchange: Any) -> tuple[nn.Module, Any]:
    """After the third step everything is overwritten and restored: a checkpoint has the whole state."""
    model, optimizer = wrapped(grid, exchange)
    for number, batch in enumerate(grid.batches(DATA, batch_size=2, steps=6)):
        optimizer.zero_grad()
        error_of(model, batch).backward()
        optimizer.step()
        if number == 2:
            checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            for group in optimizer.param_groups:
                group["lr"] = 1e9
            for state in optimizer.state.values():
                state["momentum_buffer"] = None
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
            model.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(checkpoint[1])
    return model, optimizer


LOOPS: list[Loop] = [
    plain,
    passes_with_a_tail,
    fewer_samples_than_workers,
    global_batch_size,
    accumulation,
    data_loader,
    lambda_scheduler,
    plateau_on_a_shared_number,
    plateau_on_the_groups_mean,
    adamw,
    parameter_groups,
    two_optimizers,
    alternating_updates,
    frozen_parameters,
    tied_parameters,
    compiled,
    compiled_before_it_is_wrapped,
    scaled_loss,
    saved_and_loaded,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("exchange", [DENSE, SPARSE], ids=["dense", "gtopk"])
def test_a_group_trains_as_one_process(together: Any, loop: Loop, exchange: Any) -> None:
    def work(grid: gridtrain.Grid, number: int) -> tuple[str, torch.Tensor]:
        model, optimizer = loop(grid, exchange)
        assert grid.finished
        return digest(model, optimizer), flat(model)

    results = together(work, WORKERS)
    assert len({state for state, _ in results}) == 1, "parameters and optimizer state, bit for bit"

    if exchange is DENSE:
        expected = flat(loop(OneProcess(), exchange)[0])
        largest = float((results[0][1] - expected).abs().max())
        assert largest < 1e-6, f"off by {largest:.1e} from one process with the whole batch"


@pytest.mark.parametrize("diverged", [0, 1])
def test_a_loss_that_is_not_a_number_makes_the_mean_so_on_all_workers(diverged: int) -> None:
    def train(grid: Any) -> tuple[list[bool], int]:
        model, optimizer = wrapped(grid, DENSE)
        finite = []
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            loss = error_of(model, batch)
            if grid.step == 1 and grid.rank == diverged:
                loss = loss * math.nan
            loss.backward()
            finite.append(math.isfinite(grid.mean(loss)))
            optimizer.step()
            optimizer.zero_grad()
        return finite, optimizer.skipped_steps

    assert gridtrain.local(train, workers=2) == [([True, False, True], 1)] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stand_in_has_two_samples_of_the_latest_batch(accumulate: int) -> None:
    """The others wait for it.  The third step of the pass has a single sample."""
    samples = torch.arange(16.0 * accumulate + 1).unsqueeze(1)

    def train(grid: gridtrain.Grid) -> list[tuple[bool, list[float]]]:
        model = nn.Linear(1, 1)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        seen = []
        for number, batch in enumerate(grid.batches(samples, batch_size=4, accumulate=accumulate, epochs=1)):
            seen.append((grid.has_samples, batch.flatten().tolist()))
            model(batch).mean().backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
        return seen

    seen = next(seen for seen in gridtrain.local(train, workers=2) if not seen[-1][0])
    assert [own for own, _ in seen] == [True] * 2 * accumulate + [False] * accumulate
    assert [len(batch) for _, batch in seen] == [4] * 2 * accumulate + [2] * accumulate
    read = [number for _, batch in seen for number in batch]
    assert read[-2 * accumulate :] == read[4 * accumulate : 6 * accumulate]


@pytest.mark.parametrize(
    "exchange, average_every",
    [
        (DENSE, 0),
        (gridtrain.LocalSteps(3, DENSE), 0),
        (gridtrain.LocalSteps(3, DENSE, overlap=1), 0),
        (gridtrain.LocalSteps(3, DENSE, overlap=1), 1),
    ],
    ids=["each step", "local steps", "overlapped", "averaged amid the turn"],
)
def test_a_stand_in_does_not_change_running_statistics(exchange: Any, average_every: int) -> None:
    """Two samples would spoil them, above all in each of many local steps before the last average."""
    calls = getattr(exchange, "every", 1)
    samples = torch.arange(8.0 * calls + 1).unsqueeze(1)

    def train(grid: gridtrain.Grid) -> list[tuple[bool, float]]:
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = grid.optimizer(inner, model, exchange=exchange, average_buffers_every=average_every)
        seen = []
        for batch in grid.batches(samples, batch_size=4, epochs=1):
            seen.append(grid.has_samples)
            model(batch).mean().backward()
            optimizer.step()
            seen[-1] = seen[-1], float(model[0].running_mean)
        return seen

    seen = next(seen for seen in gridtrain.local(train, workers=2) if not seen[calls][0])
    assert [own for own, _ in seen] == [True] * calls + [False] * calls
    (kept,) = {mean for _, mean in seen[calls:]}
    assert seen[0][1] > 0 and (kept == seen[calls - 1][1]) == (average_every == 0)


@pytest.mark.parametrize("draws", ["batches", "sampler"])
@pytest.mark.parametrize(
    "exchange", [DENSE, gridtrain.LocalSteps(2, DENSE)], ids=["each step", "local steps"]
)
def test_a_weighted_mean_ignores_the_batches_of_workers_without_samples(draws: str, exchange: Any) -> None:
    """Nine samples: in the last step of a pass, one worker has a single sample, and the other one none."""
    samples = torch.arange(9.0).unsqueeze(1)

    def train(grid: Any) -> list[tuple[int, float, int]]:
        model = nn.Linear(1, 1)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, exchange=exchange)
        assert not grid.has_samples
        if draws == "batches":
            batches: Any = grid.batches(samples, batch_size=4, epochs=2)
        else:
            batches = DataLoader(samples, batch_sampler=grid.sampler(samples, batch_size=4, epochs=2))  # type: ignore[arg-type]
        seen = []
        for batch in batches:
            count = len(batch) if grid.has_samples else 0
            mean = grid.mean(batch.mean() if count else math.nan, weight=count)
            seen.append((count, batch.sum().item() if count else 0.0, mean))
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    first, second = gridtrain.local(train, workers=2)
    for (count, total, mean), (other_count, other_total, other_mean) in zip(first, second, strict=True):
        if count + other_count:
            assert mean == other_mean == pytest.approx((total + other_total) / (count + other_count))
        else:  # a local step for which the whole group has no samples
            assert math.isnan(mean) and math.isnan(other_mean)
    assert sum(count for count, *_ in first + second) == 2 * len(samples)
    assert sum(total for _, total, _ in first + second) == 2 * samples.sum().item()
    assert any(count == 0 for count, *_ in first + second)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_an_impossible_weight_of_a_mean_is_refused(weight: float) -> None:
    message = rf"the weight of a number in grid.mean is {weight}; it must be finite and at least 0"
    with pytest.raises(ConfigError, match=message):
        gridtrain.local(lambda grid: grid.mean(1.0, weight=weight), workers=1)


def test_a_mean_of_complex_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        gridtrain.local(lambda grid: grid.mean(torch.tensor(1j)), workers=1)


@pytest.mark.parametrize("is_lost", [False, True], ids=["three workers", "one is lost"])
def test_workers_evaluate_their_shares_of_a_test_set(is_lost: bool, outcomes: Any) -> None:
    """The share of a worker that is lost is missing in the result, which is the same on all others."""
    test_set = torch.arange(10.0).square().tolist()

    def train(grid: gridtrain.Grid, number: int) -> tuple[list[int], float]:
        model, optimizer = wrapped(grid, DENSE)
        for batch in grid.batches(DATA, batch_size=2, steps=2):
            if grid.step == 1:
                mine = range(grid.rank, len(test_set), grid.world_size)
                with torch.no_grad(), grid.evaluation():
                    if is_lost and number == 1:
                        raise RuntimeError("lost")
                    total = sum(test_set[index] for index in mine)
                result = grid.mean(total) / grid.mean(len(mine))
            error_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(mine), result

    results = [end for end in outcomes(train, 3) if not isinstance(end, RuntimeError)]
    assert len(results) == (2 if is_lost else 3)
    shares = [index for mine, _ in results for index in mine]
    assert is_lost or sorted(shares) == list(range(len(test_set)))
    expected = sum(test_set[index] for index in shares) / len(shares)
    assert [result for _, result in results] == [pytest.approx(expected)] * len(results)
    assert len({result for _, result in results}) == 1


def test_a_local_group_writes_its_model_only_to_a_given_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(grid: Any, steps: int = 2) -> None:
        model, optimizer = wrapped(grid, DENSE)
        for batch in grid.batches(DATA, batch_size=2, steps=2):
            if grid.step == steps:
                break
            error_of(model, batch).backward()
            optimizer.step()

    export_dir = tmp_path / "model"
    gridtrain.local(train, workers=2)
    assert not list(tmp_path.rglob("final.safetensors"))
    gridtrain.local(partial(train, steps=1), workers=2, export_dir=str(export_dir))
    assert (
        caplog.text.count(f"the loop ended before the run did, so no model is written to {export_dir}") == 1
    )
    gridtrain.local(train, workers=2, export_dir=str(export_dir))
    assert list(tmp_path.rglob("final.safetensors")) == [export_dir / "final.safetensors"]


def test_a_mean_before_the_loop_is_the_workers_own_number(caplog: pytest.LogCaptureFixture) -> None:
    assert gridtrain.local(lambda grid: (grid.mean(1.0), grid.mean(2.0)), workers=1) == [(1.0, 2.0)]
    assert caplog.text.count("grid.mean returns the worker's own number on all workers before the first") == 1


def test_a_mean_that_only_one_worker_requests_ends_in_an_error() -> None:
    """Not in a wait of minutes in each step."""

    def train(grid: Any) -> None:
        model, optimizer = wrapped(grid, DENSE)
        for batch in grid.batches(DATA, batch_size=2, steps=50):
            loss = error_of(model, batch)
            loss.backward()
            if grid.is_first:
                grid.mean(loss)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ConfigError, match=r"grid.mean was called 3 times in a row without worker-"):
        gridtrain.local(train, workers=2)
