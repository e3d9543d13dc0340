"""`gridtrain export`: a file that plain PyTorch loads, or one sentence that says why not."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from torch import nn

from gridtrain.cli.main import cli
from gridtrain.core.messages import CheckpointInfo, LedgerState
from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint import checkpoint_store, serialization
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent


class Tied(nn.Module):
    """A head that shares the embedding's weight, a buffer, batch statistics: all are hard to export."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False]))


def write(folder: Path, step: int, seed: int, skipped: int = 0) -> dict[str, Any]:
    """Writes a checkpoint after `step` steps of 8 samples; returns the model's state_dict."""
    model = Tied(seed)
    optimizer = torch.optim.Adam(model.parameters())
    document, tensors = serialization.pack_state(model, optimizer, {})
    info = CheckpointInfo(
        step - 1, bytes(32), LedgerState(step, 8 * step, consumed=8 * step, skipped=8 * skipped)
    )
    checkpoint_store.save(
        CheckpointContent(info, (("model", "m"),), document, tensors, {}), folder / f"step-{step:08d}"
    )
    return model.state_dict()


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def refusal(*arguments: object) -> ConfigError:
    error = export(*arguments).exception
    assert isinstance(error, ConfigError) and error.exit_code == 2
    return error


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else safetensors.torch.load_file(path)


@pytest.mark.parametrize(
    ("skipped", "line"),
    [(200, "nothing was learned: 1,600"), (100, "little was learned: 800"), (2, "16"), (1, "")],
)
def test_an_export_says_how_much_was_skipped(tmp_path: Path, skipped: int, line: str) -> None:
    write(tmp_path, 200, seed=1, skipped=skipped)
    done = export(tmp_path, tmp_path / "model.pt")
    shown = (
        f"{line} of 1,600 samples were in skipped steps, because a gradient was not finite\n" if line else ""
    )
    assert (done.exit_code, done.stderr) == (0, shown)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_plain_pytorch_loads_an_export(tmp_path: Path, name: str) -> None:
    expected = write(tmp_path / "worker", 7, seed=1)
    done = export(tmp_path / "worker" / "step-00000007", tmp_path / name)
    assert done.exit_code == 0, done.output
    assert "the model after step 7" in done.output
    fresh = Tied(seed=2)
    fresh.load_state_dict(load(tmp_path / name), strict=True)
    assert all(torch.equal(value, expected[key]) for key, value in fresh.state_dict().items())
    assert fresh.head.weight is fresh.embed.weight
    assert [path.name for path in tmp_path.iterdir() if name in path.name] == [name], (
        "no temporary file is left"
    )


def test_the_latest_checkpoint_of_all_workers_or_the_named_step_is_exported(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints" / "ab" / "worker-0", 5, seed=5)
    older = write(tmp_path / "checkpoints" / "ab" / "worker-0", 10, seed=10)
    later = write(tmp_path / "checkpoints" / "ab" / "worker-1", 15, seed=15)
    out = tmp_path / "m.safetensors"
    assert export(tmp_path, out).exit_code == 0
    assert torch.equal(load(out)["embed.weight"], later["embed.weight"])
    assert export(tmp_path, out, "--step", 10).exit_code == 0
    assert torch.equal(load(out)["embed.weight"], older["embed.weight"])
    assert refusal(tmp_path, out, "--step", 11).remedy == "use one of the steps 5, 10, 15"
    assert torch.equal(load(out)["embed.weight"], older["embed.weight"]), (
        "a refusal leaves the file unchanged"
    )


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    older = write(tmp_path, 5, seed=5)
    write(tmp_path, 10, seed=10)
    damaged = tmp_path / "step-00000010" / "tensors.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    out = tmp_path / "m.pt"
    assert "the model after step 5" in export(tmp_path, out).output
    assert torch.equal(load(out)["embed.weight"], older["embed.weight"])
    assert "step-00000010 cannot be read" in refusal(tmp_path, out, "--step", 10).reason


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_a_full_disk_is_named_and_leaves_no_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "w", 5, seed=5)
    out = tmp_path / "out" / name
    out.parent.mkdir()
    large = {"weight": torch.zeros(1_000_000)}
    monkeypatch.setattr("gridtrain.training.checkpoint.model_export.model_tensors", lambda *_: large)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        error = refusal(tmp_path / "w", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in error.reason and "enforce" not in error.reason
    assert list(out.parent.iterdir()) == []


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    write(tmp_path / "w", 5, seed=5)
    monkeypatch.setattr(checkpoint_store, "sync_folder", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert "Read-only file system" in refusal(tmp_path / "w", tmp_path / "model.pt").reason


def test_a_model_with_nan_values_is_written_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "w", 5, seed=5)
    bad = {"mask": torch.tensor([True]), "inf": torch.tensor([-torch.inf]), "bad": torch.tensor([torch.nan])}
    monkeypatch.setattr("gridtrain.training.checkpoint.model_export.model_tensors", lambda *_: bad)
    out = tmp_path / "model.pt"
    assert export(tmp_path / "w", out).exit_code == 0 and load(out).keys() == bad.keys()
    (message,) = caplog.messages
    assert message.startswith(f"1 of the 3 tensors in {out} contain NaN, the first of them 'bad'")


def test_missing_checkpoints_and_invalid_targets_are_refused(tmp_path: Path) -> None:
    assert "there is no checkpoint in" in refusal(tmp_path, tmp_path / "m.pt").reason
    assert "cannot be read" in refusal(tmp_path / "none", tmp_path / "m.pt").reason
    write(tmp_path / "w", 5, seed=5)
    assert (
        "does not have the suffix of a supported format" in refusal(tmp_path / "w", tmp_path / "m.bin").reason
    )
    for name in ("m.pt", "m.safetensors"):
        error = refusal(tmp_path / "w", tmp_path / "missing" / name)
        assert "cannot be written" in error.reason and error.remedy


def test_a_checkpoint_of_a_peer_cannot_choose_the_written_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, tensors = serialization.pack_state(Tied(1), torch.optim.Adam(Tied(1).parameters()), {})
    names = {"model.safetensors": {"embed.weight": "embed.weight"}}
    info = CheckpointInfo(4, bytes(32), LedgerState(step=5))
    for folder, file in (("bad", "train.py"), ("good", "config.json")):
        layout = {"texts": {file: "{}"}, "names": names}
        checkpoint_store.save(
            CheckpointContent(info, (), document, tensors, {}, pretrained=layout),
            tmp_path / folder / "step-00000005",
        )
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    error = refusal(tmp_path / "bad", ".")
    assert "names the file 'train.py'; allowed are names that end in config.json" in error.reason
    assert error.remedy == "write a plain file: OUT.safetensors" and list(out.iterdir()) == []
    for name in (".", "Qwen3-0.6B-adapter"):
        assert export(tmp_path / "good", name).exit_code == 0
        written = {path.name for path in (out / name).iterdir() if path.is_file()}
        assert written == {"config.json", "model.safetensors"}
