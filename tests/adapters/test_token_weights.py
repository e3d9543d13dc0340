"""`GridTrainer` weighs by the tokens that Trainer counts: two workers are one process with both batches."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from brisk import WITHIN_S
from threaded_group import ThreadedGroup

import gridtrain
from gridtrain.tools.demo.small_llama import small_llama

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")

from gridtrain.adapters.hugging_face import GridTrainer  # noqa: E402  it needs transformers

STEPS, CONTEXT, ACCUMULATE, RATE = 3, 12, 2, 0.1


def samples() -> list[dict[str, torch.Tensor]]:
    """Texts of which 2 to 12 tokens count."""
    ids_NT = (torch.arange(200 * CONTEXT) * 7 % 256).view(-1, CONTEXT)
    counts = [2 + number * number % (CONTEXT - 1) for number in range(len(ids_NT))]
    masked = [ids_T.where(torch.arange(CONTEXT) < n, -100) for ids_T, n in zip(ids_NT, counts, strict=True)]
    return [{"input_ids": ids_T, "labels": labels_T} for ids_T, labels_T in zip(ids_NT, masked, strict=True)]


def test_two_trainers_are_one_process_with_all_tokens(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first = transformers.AutoModelForCausalLM.from_pretrained(small_llama(tmp_path / "base"))
    models = [copy.deepcopy(first) for _ in range(2)]
    batches: dict[int, list[dict[str, torch.Tensor]]] = {}
    one_at_a_time, all_made = threading.Lock(), threading.Barrier(2)

    class Recording(GridTrainer):
        def get_batch_samples(self, *args, **options):
            read, count = super().get_batch_samples(*args, **options)
            batches.setdefault(self.grid.step, []).extend(copy.deepcopy(read))
            return read, count

    def work(grid, number: int) -> None:
        with one_at_a_time:  # each constructor resets the state of Accelerate in this process
            trainer = Recording(
                grid=grid,
                grid_options={"exchange": gridtrain.Dense(), "weigh_by": "tokens"},
                model=models[number],
                args=transformers.TrainingArguments(
                    output_dir=str(tmp_path / str(number)),
                    max_steps=STEPS,
                    max_grad_norm=0,
                    lr_scheduler_type="constant",
                    per_device_train_batch_size=1 + number,
                    gradient_accumulation_steps=ACCUMULATE,
                    report_to="none",
                    use_cpu=True,
                    disable_tqdm=True,
                ),
                train_dataset=samples(),
                optimizers=(torch.optim.SGD(models[number].parameters(), lr=RATE), None),
            )
        all_made.wait(WITHIN_S)  # training reads that state
        trainer.train()

    with ThreadedGroup(tmp_path, workers=2) as group:
        group.start_all(work)
        group.finish()
    inner = torch.optim.SGD(first.parameters(), lr=RATE)
    first.train()
    for step in range(STEPS):
        inner.zero_grad()
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches[step])
        for batch in batches[step]:
            (first(**batch).loss * (batch["labels"][:, 1:] != -100).sum() / total).backward()
        inner.step()
    for model in models:
        torch.testing.assert_close(model.state_dict(), first.state_dict(), rtol=1e-4, atol=1e-5)
