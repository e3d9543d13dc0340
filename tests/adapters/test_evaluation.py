"""What one worker does beside training, and what it means for the others: they wait, or go on without it.

evaluates      step 1  step 2 [ evaluation, generation ......... ] step 3 ...
others         step 1  step 2  computes step 3, waits ...........  step 3 ...
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from brisk import WITHIN_S
from group_status import status_of
from threaded_group import ThreadedGroup

import gridtrain
from gridtrain.tools.demo.small_llama import small_llama

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-adapters")

from gridtrain.adapters.hugging_face import GridTrainer  # noqa: E402  it needs transformers

WORKERS, STEPS, AT, CONTEXT = 3, 6, 2, 16
LEARNED = 20  # steps after which the group knows how long a step takes


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One for each worker: the same base, adapters that are replaced by the group's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = small_llama(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    load = transformers.AutoModelForCausalLM.from_pretrained
    return [peft.get_peft_model(load(base), lora) for _ in range(WORKERS)]


def samples() -> list[dict[str, torch.Tensor]]:
    ids_NT = (torch.arange(10 * WORKERS * STEPS * 2 * CONTEXT) * 7 % 256).view(-1, CONTEXT)
    return [{"input_ids": ids_T, "labels": ids_T} for ids_T in ids_NT]


def adapters(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_the_others_wait_for_an_evaluation_and_all_stay_equal(models, tmp_path) -> None:
    evaluating, over = threading.Event(), threading.Event()
    computed = [threading.Event() for _ in range(WORKERS)]
    steps: dict[int, int] = {}

    def work(grid, number: int) -> None:
        model = models[number]
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = grid.optimizer(torch.optim.SGD(trained, lr=0.1), model, exchange=gridtrain.Dense())
        for batch in grid.batches(samples(), batch_size=2, steps=STEPS):
            model(**batch).loss.backward()
            if grid.step == AT and number:
                computed[number].set()
            if grid.step == AT and not number:
                with torch.no_grad(), grid.evaluation():
                    model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=4)
                    evaluating.set()
                    assert over.wait(WITHIN_S)
            optimizer.step()
            optimizer.zero_grad()
            steps[number] = grid.step

    with ThreadedGroup(tmp_path, workers=WORKERS) as group:
        group.start_all(work)
        for event in (evaluating, *computed[1:]):
            assert event.wait(WITHIN_S)
        members = status_of(group)["members"]
        assert steps == dict.fromkeys(range(WORKERS), AT), "nobody goes on without the one that evaluates"
        assert len(members) == WORKERS, "and nobody is excluded"
        over.set()
        group.finish()
    assert steps == dict.fromkeys(range(WORKERS), STEPS)
    first, *others = map(adapters, models)
    assert all(torch.equal(first, other) for other in others)


def test_with_wait_auto_the_others_go_on_and_all_are_equal_at_the_end(models, tmp_path) -> None:
    ahead = [threading.Event() for _ in range(WORKERS)]

    def work(grid, number: int) -> None:
        model = models[number]
        trained = [p for p in model.parameters() if p.requires_grad]
        inner, exchange = torch.optim.SGD(trained, lr=0.1), gridtrain.GTopK(density=0.5)
        optimizer = grid.optimizer(inner, model, exchange=exchange, wait="auto")
        has_evaluated = False
        for batch in grid.batches(samples(), batch_size=2, steps=LEARNED + 10):
            model(**batch).loss.backward()
            if grid.step >= LEARNED and not number and not has_evaluated:
                with torch.no_grad(), grid.evaluation():
                    assert all(event.wait(WITHIN_S) for event in ahead[1:]), "the others wait"
                has_evaluated = True
            optimizer.step()
            optimizer.zero_grad()
            if grid.step >= LEARNED + 3:
                ahead[number].set()

    with ThreadedGroup(tmp_path, workers=WORKERS) as group:
        group.start_all(work)
        group.finish()
    first, *others = map(adapters, models)
    assert all(torch.equal(first, other) for other in others)


class StopOnce(transformers.TrainerCallback):
    """Stops the first worker early, as EarlyStoppingCallback does when a metric has stopped improving."""

    def __init__(self, grid, stopped: list[str]) -> None:
        self._grid, self._stopped = grid, stopped

    def on_evaluate(self, args, state, control, **_) -> None:
        if self._grid.is_first and not self._stopped:
            self._stopped.append(args.output_dir)
            control.should_training_stop = True


@pytest.mark.parametrize("best", [False, True], ids=["", "load_best_model_at_end"])
def test_a_trainer_that_stops_early_leaves_and_the_others_finish(best, models, tmp_path, monkeypatch) -> None:
    one_at_a_time, all_made = threading.Lock(), threading.Barrier(WORKERS)
    stopped: list[str] = []
    finished: dict[str, tuple[bool, int]] = {}
    left, changed = [], []
    close, load_best = gridtrain.Grid.close, transformers.Trainer._load_best_model
    monkeypatch.setattr(gridtrain.Grid, "close", lambda grid, *why: (left.append(grid), close(grid, *why))[1])

    def load(trainer) -> None:
        changed.append(trainer.grid.finished or trainer.grid in left)
        load_best(trainer)

    monkeypatch.setattr(transformers.Trainer, "_load_best_model", load)

    def work(grid, number: int) -> None:
        folder = str(tmp_path / str(number))
        with one_at_a_time:  # each constructor resets the state of Accelerate in this process
            trainer = GridTrainer(
                grid=grid,
                grid_options={"exchange": gridtrain.Dense()},
                model=models[number],
                args=transformers.TrainingArguments(
                    output_dir=folder,
                    max_steps=STEPS,
                    per_device_train_batch_size=2,
                    eval_strategy="steps",
                    eval_steps=AT,
                    save_strategy="steps" if best else "no",
                    save_steps=AT,
                    load_best_model_at_end=best,
                    report_to="none",
                    use_cpu=True,
                    disable_tqdm=True,
                ),
                train_dataset=samples(),
                eval_dataset=samples()[:2],
                callbacks=[StopOnce(grid, stopped)],
            )
        all_made.wait(WITHIN_S)
        trainer.train()
        finished[folder] = grid.finished, trainer.state.global_step

    with ThreadedGroup(tmp_path, workers=WORKERS) as group:
        group.start_all(work)
        group.finish()
    (early,) = stopped
    assert finished.pop(early) == (False, AT)
    assert list(finished.values()) == [(True, STEPS)] * 2
    assert bool(changed) == best and all(changed), "a model is exchanged for the best one after the run"
    if not best:
        first, second = (adapters(models[int(Path(folder).name)]) for folder in finished)
        assert torch.equal(first, second)
