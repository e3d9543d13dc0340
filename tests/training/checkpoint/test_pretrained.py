"""Directories for `from_pretrained`, without PEFT and transformers; with them: tests/adapters."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint import pretrained
from gridtrain.training.checkpoint.pretrained import PretrainedLayout, write_directory

NAMES = {f"layers.{n}.weight": f"model.layers.{n}.weight" for n in range(5)}
WHOLE = PretrainedLayout({"config.json": "{}"}, {"model.safetensors": NAMES})
ADAPTER = PretrainedLayout(
    {"adapter_config.json": "{}", "second/adapter_config.json": "{}"},
    {"adapter_model.safetensors": {"a": "x.default"}, "second/adapter_model.safetensors": {"a": "x.second"}},
)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of 40 bytes each."""
    return {stored: torch.full((10,), float(n)) for n, stored in enumerate(NAMES.values())}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("most_bytes", "shards"), [(200, 1), (199, 2), (120, 2), (119, 3), (80, 3), (40, 5), (1, 5)]
)
def test_a_shard_has_at_most_the_given_size_or_one_tensor(
    most_bytes: int, shards: int, tmp_path: Path
) -> None:
    written, left_out = write_directory(WHOLE, tensors(), tmp_path / "out", most_bytes)
    assert (len(written), sum(tensor.numel() for tensor in written), left_out) == (5, 50, [])
    paths = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(paths) == shards
    index = tmp_path / "out" / "model.safetensors.index.json"
    found = {}
    for path in paths:
        tensors_by_name = safetensors.torch.load_file(path)
        assert sum(tensor.nbytes for tensor in tensors_by_name.values()) <= max(most_bytes, 40)
        found |= {name: (path.name, tensor) for name, tensor in tensors_by_name.items()}
    assert all(torch.equal(found[name][1], tensors()[stored]) for name, stored in NAMES.items())
    if shards == 1:
        assert paths[0].name == "model.safetensors" and not index.exists()
        return
    body = json.loads(index.read_text())
    assert body["weight_map"] == {name: path for name, (path, _) in found.items()}
    assert body["metadata"] == {"total_size": 200}


def test_a_later_export_leaves_no_tensors_of_an_earlier_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_directory(WHOLE, tensors(), out, 40)
    (out / "tokenizer.json").write_text("mine")
    write_directory(WHOLE, tensors(), out, 200)
    assert files(out) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert files(tmp_path) == [f"out/{name}" for name in files(out)], "no temporary files"


def test_two_adapters_are_written_to_separate_folders(tmp_path: Path) -> None:
    tensors_by_name = {"x.default": torch.zeros(2), "x.second": torch.ones(3), "base": torch.ones(9)}
    written, left_out = write_directory(ADAPTER, tensors_by_name, tmp_path / "out")
    assert (len(written), sum(tensor.numel() for tensor in written), left_out) == (2, 5, [])
    assert files(tmp_path / "out") == sorted([*ADAPTER.texts, *ADAPTER.names])
    second = safetensors.torch.load_file(tmp_path / "out" / "second" / "adapter_model.safetensors")
    assert torch.equal(second["a"], tensors_by_name["x.second"])


def test_a_tensor_that_the_checkpoint_lacks_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    tensors_by_name = tensors()
    del tensors_by_name["model.layers.3.weight"]
    with pytest.raises(ConfigError, match=r"does not have 1 of 5 tensors, such as 'model.layers.3.weight'"):
        write_directory(WHOLE, tensors_by_name, tmp_path / "out")
    assert files(tmp_path) == []


def test_an_adapter_may_lack_frozen_tensors_but_not_all(tmp_path: Path) -> None:
    (written,), left_out = write_directory(ADAPTER, {"x.second": torch.ones(3)}, tmp_path / "out")
    assert written.tolist() == [1.0] * 3 and left_out == ["x.default"]
    with pytest.raises(ConfigError, match="does not have 2 of 2 tensors"):
        write_directory(ADAPTER, {"base": torch.ones(3)}, tmp_path / "none")


def test_a_written_description_is_read_and_a_damaged_one_is_refused() -> None:
    for layout in (WHOLE, ADAPTER):
        assert PretrainedLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    for node in (
        [], "", {"texts": {}}, {"texts": {}, "names": []}, {"texts": {}, "names": {"f": ["a"]}},
        {"texts": {"../config.json": ""}, "names": {}}, {"texts": {"/etc/config.json": ""}, "names": {}},
        {"texts": {}, "names": {"a/../../m.safetensors": {}}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="its description of a pretrained model"):
            PretrainedLayout.from_json(node)


@pytest.mark.parametrize(
    "path",
    [
        "train.py", ".bashrc", ".config.json", "", "config.json/x", "a/config.json",
        "a/b/adapter_config.json", "./config.json", "../adapter_config.json", ".ssh/adapter_config.json",
        "/adapter_config.json", "a\\config.json", "C:config.json", "config.json\n", "model.safetensors",
        "tokenizer.json",
    ],
)  # fmt: skip
def test_a_checkpoint_does_not_choose_the_files_that_an_export_writes(path: str) -> None:
    with pytest.raises(ValueError, match=r"names the file .*; allowed are names that end in config\.json"):
        PretrainedLayout.from_json({"texts": {path: ""}, "names": {}})


@pytest.mark.parametrize(
    "path",
    [
        "config.json", "x.safetensors", "model-00001-of-00002.safetensors", ".ssh/adapter_model.safetensors",
        "a/model.safetensors", "a/b/adapter_model.safetensors", "../adapter_model.safetensors",
    ],
)  # fmt: skip
def test_a_checkpoint_does_not_choose_the_files_of_tensors(path: str) -> None:
    with pytest.raises(ValueError, match=r"names the file .*; allowed are"):
        PretrainedLayout.from_json({"texts": {}, "names": {path: {}}})


def test_the_size_of_a_description_is_bounded() -> None:
    texts = {"config.json": "x" * (pretrained.MAX_TEXT_BYTES + 1)}
    with pytest.raises(
        ValueError, match=r"has 16777217 bytes for config\.json; at most 16777216 are allowed"
    ):
        PretrainedLayout.from_json({"texts": texts, "names": {}})
    texts = {f"{n}_config.json": "" for n in range(pretrained.MAX_FILES + 1)}
    with pytest.raises(ValueError, match="names 65 files; at most 64"):
        PretrainedLayout.from_json({"texts": texts, "names": {}})
    for node in (
        {"texts": {"config.json": "\ud800"}, "names": {}},
        {"texts": {}, "names": {"model.safetensors": {"\ud800": "a"}}},
    ):
        with pytest.raises(ValueError, match="is malformed"):
            PretrainedLayout.from_json(node)
    for copies in (pretrained.MAX_COPIES, pretrained.MAX_COPIES + 1):
        many = {"texts": {}, "names": {"adapter_model.safetensors": {f"{n}": "a" for n in range(copies)}}}
        if copies == pretrained.MAX_COPIES:
            PretrainedLayout.from_json(many)
            continue
        with pytest.raises(ValueError, match="has 5 names for the tensor 'a' in adapter_model"):
            PretrainedLayout.from_json(many)


def test_a_whole_model_replaces_an_adapter(tmp_path: Path) -> None:
    """With an adapter's configuration in the folder, `from_pretrained` would look for the adapter's base."""
    out = tmp_path / "out"
    adapter = PretrainedLayout({"adapter_config.json": "{}"}, {"adapter_model.safetensors": {"a": "x"}})
    write_directory(adapter, {"x": torch.zeros(2)}, out)
    write_directory(WHOLE, tensors(), out)
    assert files(out) == ["config.json", "model.safetensors"]
    write_directory(adapter, {"x": torch.zeros(2)}, out)
    assert files(out) == ["adapter_config.json", "adapter_model.safetensors", "config.json"]


def test_a_failure_keeps_the_tensors_of_an_earlier_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, replaced, replace = tmp_path / "out", [], os.replace
    write_directory(WHOLE, tensors(), out, 40)
    (out / "model-best.safetensors").write_text("mine")
    before = {name: (out / name).read_bytes() for name in files(out)}

    def fail(source: Path, target: Path) -> None:
        replaced.append(target.name)
        raise PermissionError(errno.EACCES, "Permission denied", str(target))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(ConfigError, match="out cannot be written: Permission denied") as caught:
            write_directory(WHOLE, tensors(), out, 200)
    assert caught.value.remedy == "choose a folder that you may write to"
    assert {name: (out / name).read_bytes() for name in files(out)} == before
    assert files(tmp_path) == [f"out/{name}" for name in before] and replaced == ["model.safetensors"]

    def record(source: Path, target: Path) -> None:
        assert len(list(out.glob("model-0*"))) == 5, "the earlier files still exist"
        replaced.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", record)
    write_directory(WHOLE, tensors(), out, 200)
    assert replaced[1:] == ["model.safetensors", "config.json"]
    assert files(out) == ["config.json", "model-best.safetensors", "model.safetensors"], "other files stay"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "full"), "free space"),
        (safetensors.SafetensorError("Error: I/O error: File too large (os error 27)"), "free space"),
        (OSError(errno.EROFS, "read-only"), "may write to"),
        (FileNotFoundError(errno.ENOENT, "none"), "create the folder above"),
        (NotADirectoryError(errno.ENOTDIR, "a file"), "choose another folder"),
    ],
)
def test_the_remedy_fits_the_error(error: Exception, remedy: str) -> None:
    assert remedy in pretrained.unwritable(Path("out"), error).remedy


@pytest.mark.parametrize("name", [".", "../out", "../other/../out"])
def test_the_folder_may_be_the_current_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("out", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "out")
    write_directory(WHOLE, tensors(), Path(name))
    assert files(tmp_path) == ["out/config.json", "out/model.safetensors"]


class Adapter(nn.Linear):
    """The interface of a `PeftModel` that `describe` uses; adapters have folders."""

    folder = ""

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        path = folder / self.folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        safetensors.torch.save_file(state_dict, path / "adapter_model.safetensors")


def test_a_model_that_cannot_be_exported_is_not_described(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "peft.peft_model", SimpleNamespace(PeftModel=Adapter))
    model = Adapter(2, 1)
    for model.folder in ("", "second", "my adapter_2"):
        layout = pretrained.describe(model, model.parameters())
        assert layout is not None and PretrainedLayout.from_json(layout.to_json()) == layout
        assert [list(names) for names in layout.names.values()] == [["bias", "weight"]]
    assert not caplog.records
    model.folder = ".hidden"
    assert pretrained.describe(model, model.parameters()) is None
    assert "can only be exported as .safetensors or .pt files: its description" in caplog.text


@dataclass
class Options:
    """The interface of PEFT's `LoraConfig` that `adapter_facts` uses."""

    r: int = 8
    lora_alpha: int = 8
    bias: str = "none"
    rank_pattern: dict[str, int] = field(default_factory=dict)
    peft_version: str = "0.17.0"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class LaterOptions(Options):
    """Those of a later version, which has more of them."""

    peft_version: str = "0.21.0"
    use_other: bool | None = None
    group_size: int = 16


def test_versions_of_peft_with_other_options_have_the_same_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft.peft_model", SimpleNamespace(PeftModel=Adapter))

    def fact_of(options: Options) -> str:
        model = Adapter(2, 1)
        model.peft_config = {"default": options}
        ((name, text),) = pretrained.adapter_facts(model)
        assert name == "adapter" and text.startswith(f"default r=8 lora_alpha={options.lora_alpha} digest ")
        return text

    same = [fact_of(Options(rank_pattern={"q": 2})), fact_of(LaterOptions(rank_pattern={"q": 2}))]
    others = [
        fact_of(options)
        for options in (
            *(LaterOptions(), Options(rank_pattern={"q": 3}), Options(bias="all"), Options(lora_alpha=4)),
            *(LaterOptions(use_other=True), LaterOptions(group_size=8)),
        )
    ]
    assert same[0] == same[1] and len({same[0], *others}) == 1 + len(others)


def test_a_plain_model_is_not_described() -> None:
    assert pretrained.find_pretrained(nn.Linear(2, 1)) is None
    assert pretrained.describe(nn.Linear(2, 1), []) is None
