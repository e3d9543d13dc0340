"""Trainers of transformers and trl with data that is read by shards, and with streams, which are refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from threaded_group import ThreadedGroup
from torch.utils.data import IterableDataset

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.training.data.shard_files import ShardCache
from gridtrain.training.data.shard_index import build_index, write_index
from gridtrain.training.data.token_packing import tokenizer_named

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")
pytest.importorskip("peft", reason="peft is not installed: make test-adapters")

from gridtrain.adapters.hugging_face import GridTrainer  # noqa: E402  it needs transformers

WORKERS, STEPS, BATCH, CONTEXT = 2, 6, 2, 16


def write_texts(folder: Path) -> list[str]:
    names = []
    for shard in range(4):
        names.append(str(folder / f"{shard}.jsonl"))
        texts = (f"document {shard} {number} " * 3 for number in range(9 + shard))
        Path(names[-1]).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return names


def packed(folder: Path) -> gridtrain.Shards:
    index = build_index(write_texts(folder), tokenize=tokenizer_named("bytes"), tokenizer="bytes")
    write_index(index, folder / "index.json")
    return gridtrain.Shards(folder / "index.json", pack=CONTEXT, decode=_example)


def _example(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens.clamp(max=255), "labels": tokens.clamp(max=255)}


def streamed(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    from gridtrain.adapters import datasets as streams

    files = write_texts(folder)
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True).map(
        _tokens, remove_columns=["text"]
    )
    cache = folder / "cache"
    streams.write_index(stream, folder / "index.json", cache=ShardCache(cache))
    return streams.StreamShards(stream, folder / "index.json", cache=cache)


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    ids = list(row["text"].encode()[:CONTEXT])
    return {"input_ids": ids, "labels": ids}


def arguments(folder: Path, kind: type, **options: Any) -> Any:
    return kind(output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True,
                report_to="none", save_strategy="no", logging_strategy="no", **options)  # fmt: skip


def trainer_of(kind: str, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    base = small_llama(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    if kind == "trainer":
        args = arguments(folder, transformers.TrainingArguments)
        return GridTrainer(model=model, args=args, **options)
    trl = pytest.importorskip("trl", reason="trl is not installed: make test-adapters")
    from gridtrain.adapters.trl import GridSFTTrainer

    args = arguments(folder, trl.SFTConfig)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    return GridSFTTrainer(model=model, args=args, processing_class=tokenizer, **options)


@pytest.mark.parametrize(
    ("kind", "make"),
    [("trainer", packed), ("trainer", streamed), ("sft", packed), ("sft", streamed)],
)
def test_a_trainer_reads_by_shards(
    kind: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    data = [make(tmp_path / "data") for _ in range(WORKERS)]
    models: dict[int, Any] = {}
    # Threads share what transformers replaces while it loads a model, and the state of Accelerate.
    one_at_a_time, all_made = threading.Lock(), threading.Barrier(WORKERS)
    folders = [tmp_path / str(number) for number in range(WORKERS)]

    def work(grid: gridtrain.Grid, number: int) -> None:
        options = {"exchange": gridtrain.Dense()}
        with one_at_a_time:
            trainer = trainer_of(
                kind, folders[number], grid=grid, grid_options=options, train_dataset=data[number]
            )
        all_made.wait(WITHIN_S)
        trainer.train()
        models[number] = trainer.model
        assert trainer.state.global_step == STEPS

    with ThreadedGroup(tmp_path, workers=WORKERS) as group:
        group.start_all(work)
        group.finish()
    first, second = (
        torch.cat([p.detach().flatten() for p in models[n].parameters()]) for n in range(WORKERS)
    )
    assert torch.equal(first, second)
    assert all(1 <= len(each.opened) < 4 for each in data), "no worker opens all files"


class Endless(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        while True:
            yield {"input_ids": torch.zeros(CONTEXT, dtype=torch.int64)}


@pytest.mark.parametrize("kind", ["trainer", "sft"])
@pytest.mark.parametrize("source", ["torch", "datasets"])
def test_a_stream_is_refused_before_the_first_step(
    kind: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if source == "datasets":
        dataset: Any = (
            pytest.importorskip("datasets").Dataset.from_list([{"text": "a"}]).to_iterable_dataset()
        )
    else:
        dataset = Endless()
    with pytest.raises(ConfigError, match="without a length") as caught:
        trainer_of(kind, tmp_path, grid=None, train_dataset=dataset)
    assert "StreamShards" in caught.value.remedy


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_an_empty_data_set_is_refused_before_the_first_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dataset = pytest.importorskip("datasets").Dataset.from_list([])
    with pytest.raises(ConfigError, match=r"^train_dataset, a Dataset, has no samples -> check the paths"):
        trainer_of(kind, tmp_path, grid=None, train_dataset=dataset)


@pytest.mark.parametrize(("kind", "pack"), [("trainer", 0), ("trainer", CONTEXT), ("sft", 0)])
def test_samples_that_a_trainer_cannot_collate_are_shown(
    kind: str, pack: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text("a line of some words\n" * 40)
    index = build_index([str(tmp_path / "text.txt")], tokenize=tokenizer_named("bytes"), tokenizer="bytes")
    write_index(index, tmp_path / "index.json")
    data = gridtrain.Shards(tmp_path / "index.json", **({"pack": pack} if pack else {}))

    def work(grid: gridtrain.Grid, _: int) -> None:
        options = {"exchange": gridtrain.Dense()}
        trainer_of(kind, tmp_path, grid=grid, grid_options=options, train_dataset=data).train()

    with (
        ThreadedGroup(tmp_path, workers=1) as group,
        pytest.raises(
            ConfigError, match="cannot make a batch of samples such as " + ("tensor" if pack else "'a line")
        ) as caught,
    ):
        group.start_all(work)
        group.finish()
    assert "decode=" in caught.value.remedy


def test_a_column_that_trl_does_not_find_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dataset = pytest.importorskip("datasets").Dataset.from_list([{"body": "a"}])
    with pytest.raises(ConfigError, match="train_dataset has no column 'text'; its columns: body"):
        trainer_of("sft", tmp_path, grid=None, train_dataset=dataset)


def test_a_missing_chat_template_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dataset = pytest.importorskip("datasets").Dataset.from_list([{"messages": messages}])
    with pytest.raises(ConfigError, match="the base's tokenizer has no chat template -> use a base that was"):
        trainer_of("sft", tmp_path, grid=None, train_dataset=dataset)
