"""The text of the demo: the same on every call, no file in both halves, and an error if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridtrain.errors import ConfigError
from gridtrain.tools.demo import text_corpus


def library(folder: Path, files: int, lines: int) -> Path:
    for number in range(files):
        (folder / f"m{number:02}.py").write_text(f"module {number:02}\n" * lines)
    return folder


def test_every_tenth_file_is_held_out_and_no_file_is_in_both(tmp_path: Path) -> None:
    corpus = text_corpus.load_corpus(library(tmp_path, files=40, lines=2_000))

    held_out = {line for line in corpus.held_out.splitlines() if line}
    assert held_out == {b"module 09", b"module 19", b"module 29", b"module 39"}
    assert not held_out & set(corpus.train.splitlines())
    assert corpus.files == 40


def test_a_long_file_is_truncated_at_the_end_of_a_line(tmp_path: Path) -> None:
    corpus = text_corpus.load_corpus(library(tmp_path, files=30, lines=9_000))

    assert len(corpus.train) + len(corpus.held_out) <= 30 * text_corpus.FILE_LIMIT_BYTES
    assert set(corpus.train.splitlines()) <= {b"module %02d" % i for i in range(30)}


def test_the_size_of_the_text_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_corpus, "TOTAL_LIMIT_BYTES", 700_000)
    corpus = text_corpus.load_corpus(library(tmp_path, files=60, lines=3_000))

    assert 512 * 1024 <= len(corpus.train) + len(corpus.held_out) <= 700_000


def test_this_python_has_enough_text_and_it_is_always_the_same() -> None:
    first, second = text_corpus.load_corpus(), text_corpus.load_corpus()

    assert first == second
    assert len(first.train) > 1_000_000 and len(first.held_out) > 50_000
    assert b"import" in first.train and b"import" in first.held_out


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_stripped_standard_library_is_named_with_a_remedy(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=r"has 0 bytes of Python source in 0 files.*stripped or zipped"):
        text_corpus.load_corpus(tmp_path / folder)
