"""Models of an earlier end of a run are kept when it ends again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint.model_export import keep_earlier

PARTS = "final-00001-of-00002.safetensors", "final-00002-of-00002.safetensors"


def files_in(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
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
        for name in PARTS:  # of two workers that share the folder
            said.append(keep_earlier(tmp_path, name))
            write(tmp_path / name, end)
    folders = [
        f"; the one that was there before is in {tmp_path / name}" for name in ("earlier-1", "earlier-2")
    ]
    assert said == ["", "", *folders[:1] * 2, *folders[1:] * 2]
    assert files_in(tmp_path) == {
        **dict.fromkeys(PARTS, "third"),
        **{f"earlier-1/{name}": "first" for name in PARTS},
        **{f"earlier-2/{name}": "second" for name in PARTS},
    }


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
    write(tmp_path / PARTS[0], "first")
    (tmp_path / "earlier-1").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        keep_earlier(tmp_path, PARTS[0])
