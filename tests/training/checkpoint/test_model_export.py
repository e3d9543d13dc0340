"""Models of an earlier end of a run are kept when it ends again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint import model_export
from gridtrain.training.checkpoint.model_export import (
    END,
    FINAL_FILE,
    FINAL_INDEX,
    keep_earlier,
    keep_earlier_parts,
    save_model,
)


def files_in(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".final.lock")
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def write(path: Path, text: str) -> None:
    """Replace a file, as an export does."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".partial").write_text(text)
    os.replace(path.with_suffix(".partial"), path)


@pytest.mark.parametrize("has_links", [True, False])
def test_each_end_of_a_run_keeps_the_models_of_the_earlier_ones(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError("no links")))
    said = []
    for end in ("first", "second", "third"):
        said.append(keep_earlier(tmp_path, FINAL_FILE))
        write(tmp_path / FINAL_FILE, end)
    first, second = (f"; the one that was there before is in {tmp_path / f'earlier-{n}'}" for n in (1, 2))
    assert said == ["", first, second]
    assert files_in(tmp_path) == {
        FINAL_FILE: "third",
        f"earlier-1/{FINAL_FILE}": "first",
        f"earlier-2/{FINAL_FILE}": "second",
    }


def write_parts(folder: Path, end: str, stages: int, own: Iterable[int]) -> str:
    """As workers of these stages do, the first of which writes the index; return what they say."""
    said = ""
    for stage in own:
        said += keep_earlier_parts(folder, end)
        name = f"final-{stage + 1:05d}-of-{stages:05d}.safetensors"
        save_model({"x": torch.tensor(float(stage))}, folder / name, {END: end})
        if not stage:
            write(folder / FINAL_INDEX, json.dumps({"metadata": {END: end}}))
    return said


def parts_in(folder: Path) -> dict[str, set[str]]:
    """The ends of which there are parts, and how many, by folder."""
    ends: dict[str, set[str]] = {}
    for name, path in ((path.parent.name, path) for path in folder.rglob("final*")):
        if path.suffix == ".json":
            end = json.loads(path.read_text())["metadata"][END]
        else:
            with safe_open(path, "pt") as file:
                end = file.metadata()[END]
        ends.setdefault(name, set()).add(f"{end}: {path.name}")
    return ends


def named(end: str, *stages: int, of: int, index: bool = True) -> set[str]:
    parts = {f"{end}: final-{stage + 1:05d}-of-{of:05d}.safetensors" for stage in stages}
    return parts | ({f"{end}: {FINAL_INDEX}"} if index else set())


def test_models_in_stages_of_different_ends_are_not_mixed(tmp_path: Path) -> None:
    """All workers share the folder; for the second end the model was partitioned again."""
    run = tmp_path / "run"
    assert not write_parts(run, "first", 2, (0, 1))
    before = f"; the one that was there before is in {run}"
    assert write_parts(run, "second", 3, (2, 0, 1)) == f"{before}/earlier-1"
    assert write_parts(run, "third", 2, (1, 0)) == f"{before}/earlier-2"
    assert not write_parts(run, "third", 2, (1,)), "a replica writes it again, since the first one was lost"
    assert parts_in(run) == {
        "run": named("third", 0, 1, of=2),
        "earlier-1": named("first", 0, 1, of=2),
        "earlier-2": named("second", 0, 1, 2, of=3),
    }


def test_a_worker_keeps_the_parts_of_its_former_stages_apart(tmp_path: Path) -> None:
    """The other workers have other disks."""
    run = tmp_path / "run"
    for end, stage in (("first", 1), ("second", 0), ("third", 1)):
        write_parts(run, end, 2, (stage,))
    assert parts_in(run) == {
        "run": named("third", 1, of=2, index=False),
        "earlier-1": named("first", 1, of=2, index=False),
        "earlier-2": named("second", 0, of=2),
    }


@pytest.mark.parametrize("raised", [FileNotFoundError, RuntimeError])
def test_a_part_that_another_worker_moves_while_it_is_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
) -> None:
    """The reader of safetensors raises the first, and torch, which maps the file, the second."""

    def vanish(path: Path, framework: str) -> Any:
        path.unlink()
        raise raised(f"unable to open file {path}: No such file or directory")

    write_parts(tmp_path, "one", 2, [1, 2])
    monkeypatch.setattr(model_export, "safe_open", vanish)
    assert write_parts(tmp_path, "two", 2, [1]) == ""


def test_parts_of_an_unknown_end_are_kept_too(tmp_path: Path) -> None:
    """An earlier version wrote them, or they are damaged."""
    names = ("final-00001-of-00002.safetensors", "final-00002-of-00002.safetensors", FINAL_INDEX)
    for number in (1, 2):
        for name in names:
            write(tmp_path / name, f"damaged {number}")
        assert keep_earlier_parts(tmp_path, "second").endswith(f"earlier-{number}")
    assert files_in(tmp_path) == {f"earlier-{n}/{name}": f"damaged {n}" for name in names for n in (1, 2)}


def test_an_earlier_adapter_stays_loadable_with_the_files_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "final-adapter"
    write(folder / "tokenizer.json", "written by the script")
    assert not keep_earlier(tmp_path, "final-adapter"), "it contains no model yet"
    write(folder / "adapter_model.safetensors", "first")
    assert keep_earlier(tmp_path, "final.safetensors", "final-adapter").endswith("earlier-1")
    write(folder / "adapter_model.safetensors", "second")
    assert files_in(tmp_path / "earlier-1" / "final-adapter") == {
        "tokenizer.json": "written by the script",
        "adapter_model.safetensors": "first",
    }


def test_a_model_that_cannot_be_kept_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / FINAL_FILE, "first")
    (tmp_path / "earlier-1").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        keep_earlier(tmp_path, FINAL_FILE)
