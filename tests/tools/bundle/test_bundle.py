"""The bundle of a folder with a run.toml, and the checks of a volunteer's machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.tools.bundle import Bundle, digest_of
from gridtrain.tools.bundle.bundle import run_to_toml
from gridtrain.tools.bundle.bundle_archive import MAX_FILES, pack
from gridtrain.tools.options import RunFile

SCRIPT = b"print('hello')\n"
TOML = """
[run]
name = "mine"
about = "a \\"small\\" run \u00e9"
script = "train.py"
arguments = ["--size", "small"]
files = ["lib/model.py", "train.py"]
requires = ["torch>=2.6", "numpy"]
image = "registry.example/mine:1"

[run.data]
file = "corpus.bin"
digest = "sha256:DIGEST"
where = "https://example.org/corpus.bin"

[coordinator]
listen = "tcp://0.0.0.0:7700"

[worker]
upload_limit = "1Mbit"
""".replace("DIGEST", 64 * "a")

SHIPPED = """\
[run]
name = "mine"
about = "a \\"small\\" run \u00e9"
script = "train.py"
digest = "SCRIPT"
arguments = ["--size", "small"]
files = ["lib/model.py"]
requires = ["torch>=2.6", "numpy"]
image = "registry.example/mine:1"

[run.data]
file = "corpus.bin"
digest = "sha256:DIGEST"
where = "https://example.org/corpus.bin"
""".replace("DIGEST", 64 * "a").replace("SCRIPT", digest_of(SCRIPT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "model.py").write_bytes(b"x = 1\n")
    (tmp_path / "train.py").write_bytes(SCRIPT)
    (tmp_path / "secret.txt").write_text("not named")
    (tmp_path / "run.toml").write_text(TOML)
    return tmp_path


def made(folder: Path) -> Bundle:
    bundle = Bundle.from_run_file(RunFile.find({}, folder))
    assert bundle is not None
    return bundle


def test_only_named_files_and_the_run_table_are_in_the_bundle(folder: Path) -> None:
    bundle = made(folder)
    assert sorted(bundle.files) == ["lib/model.py", "run.toml", "train.py"]
    assert bundle.files["run.toml"].decode() == SHIPPED
    assert bundle.digest == digest_of(bundle.archive)
    opened = Bundle.from_archive(bundle.archive, bundle.digest)
    assert opened == bundle and opened.run.digest == digest_of(SCRIPT)


def test_the_digest_depends_only_on_the_contents(folder: Path) -> None:
    digest = made(folder).digest
    (folder / "run.toml").write_text(TOML.replace("1Mbit", "2Mbit") + "\n# a comment\n")
    (folder / "train.py").touch()
    assert made(folder).digest == digest
    (folder / "lib" / "model.py").write_bytes(b"x = 2\n")
    assert made(folder).digest != digest


def test_a_run_without_a_script_has_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "mine"\n')
    assert Bundle.from_run_file(RunFile.find({}, tmp_path)) is None
    assert Bundle.from_run_file(RunFile()) is None


def test_a_script_with_another_digest_is_refused(folder: Path) -> None:
    pinned = TOML.replace('script = "train.py"', f'script = "train.py"\ndigest = "{digest_of(SCRIPT)}"')
    (folder / "run.toml").write_text(pinned)
    assert made(folder).run.digest == digest_of(SCRIPT)
    (folder / "train.py").write_bytes(SCRIPT + b"import os\n")
    with pytest.raises(ConfigError, match="has the digest") as caught:
        made(folder)
    assert (
        digest_of(SCRIPT) in caught.value.reason
        and "write the new digest into run.toml" in caught.value.remedy
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("lib/model.py", "lib/gone.py", "gone.py, which is listed in run.toml, cannot be read"),
        ('"train.py"]', '"run.toml"]', "lists run.toml itself"),
        ("lib/model.py", "../model.py", "refers to '../model.py'"),
    ],
)
def test_invalid_files_are_refused(folder: Path, old: str, new: str, words: str) -> None:
    (folder / "run.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=words) as caught:
        made(folder)
    assert caught.value.remedy


def test_a_run_names_as_many_files_as_a_bundle_holds(folder: Path) -> None:
    named = [f"lib/m{n}.py" for n in range(MAX_FILES - 2)]  # beside train.py and run.toml
    for name in named:
        (folder / name).touch()
    (folder / "run.toml").write_text(TOML.replace('"lib/model.py"', str(named)[1:-1].replace("'", '"')))
    assert len(made(folder).files) == MAX_FILES


def test_a_bundle_with_another_digest_is_refused(folder: Path) -> None:
    bundle = made(folder)
    with pytest.raises(RemoteProtocolError, match="was requested"):
        Bundle.from_archive(bundle.archive + b"\0", bundle.digest)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.py": SCRIPT}, "not in canonical form"),
        ({"run.toml": SHIPPED.encode(), "train.py": SCRIPT}, "files other than those in the archive"),
        ({"run.toml": SHIPPED.encode(), "train.py": SCRIPT, "lib/model.py": b"", "more": b""}, "files other"),
        (
            {"run.toml": SHIPPED.encode(), "train.py": b"evil", "lib/model.py": b""},
            "does not have the digest",
        ),
        ({"run.toml": b"[run", "train.py": SCRIPT}, "run.toml"),
        ({"run.toml": b"\xff", "train.py": SCRIPT}, "run.toml"),
        ({"run.toml": (SHIPPED + "# hidden\n").encode(), "train.py": SCRIPT}, "not in canonical form"),
        ({"run.toml": b'[worker]\nupload_limit = "1Mbit"\n', "train.py": SCRIPT}, "not in canonical form"),
    ],
    ids=["no run.toml", "less", "more", "another script", "no TOML", "no text", "a comment", "other tables"],
)
def test_inconsistent_archives_are_refused(files: dict[str, bytes], words: str) -> None:
    archive = pack(files)
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        Bundle.from_archive(archive, digest_of(archive))
    assert "nothing from this bundle was run" in caught.value.remedy


INDEXED = TOML[: TOML.index("[run.data]")] + '[run.data]\nindex = "sets/index.json"\nwhere = "words"\n'


def test_the_index_of_the_data_is_in_the_bundle_and_its_digest(folder: Path) -> None:
    (folder / "run.toml").write_text(INDEXED)
    (folder / "sets").mkdir()
    index = folder / "sets" / "index.json"
    index.write_text('{"shards": [{"url": "https://example.org/a.txt"}, {"url": "b.txt"}]}')
    bundle = made(folder)
    assert bundle.files["sets/index.json"] == index.read_bytes()
    assert Bundle.from_archive(bundle.archive, bundle.digest) == bundle
    text = bundle.files["run.toml"].decode()
    assert text.endswith('[run.data]\nindex = "sets/index.json"\nwhere = "words"\n')
    index.write_text('{"shards": [{"url": "https://example.org/c.txt"}]}')
    assert made(folder).digest != bundle.digest
    files = {"run.toml": text.replace('"lib/model.py", "sets/index.json"', '"lib/model.py"').encode()}
    archive = pack({**bundle.files, **files})
    with pytest.raises(RemoteProtocolError):
        Bundle.from_archive(archive, digest_of(archive))
    archive = pack({name: b for name, b in {**bundle.files, **files}.items() if name != "sets/index.json"})
    with pytest.raises(RemoteProtocolError, match=r"no file sets/index.json, the index"):
        Bundle.from_archive(archive, digest_of(archive))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is malformed: TypeError"),
        ("{", "is malformed: JSONDecodeError"),
        ('{"shards": [{"url": "/home/me/a.txt"}]}', "lists /home/me/a.txt, a file on this machine"),
        ('{"shards": [{"url": "file:///a.txt"}]}', "lists file:///a.txt, a file on this machine"),
    ],
)
def test_an_index_that_volunteers_cannot_use_is_refused(folder: Path, text: str, words: str) -> None:
    (folder / "run.toml").write_text(INDEXED.replace("sets/", ""))
    (folder / "index.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        made(folder)
    assert "--url URL" in caught.value.remedy


def test_the_run_toml_of_a_bundle_is_read_back(folder: Path) -> None:
    run = replace(made(folder).run, about="", image="", data=None, requires=(), arguments=())
    assert RunFile.parse(run_to_toml(run).encode(), Path("run.toml")).run == run
