"""Tests of the wheel, because an editable install hides missing files."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = target.glob("*.whl")
    return made


def test_the_wheel_contains_the_packages_and_other_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "gridtrain/py.typed",
        "gridtrain_coordinator/py.typed",
        "gridtrain_worker/py.typed",
        "gridtrain/network/wire/PROTOCOL.md",
    }
    assert expected <= names, f"missing: {sorted(expected - names)}"
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"gridtrain", "gridtrain_coordinator", "gridtrain_worker"}


def test_the_wheel_contains_every_source_file(wheel: Path) -> None:
    """Also SQL migrations and other files beside the sources."""
    packaged = set(zipfile.ZipFile(wheel).namelist())
    for root in (ROOT, ROOT / "coordinator", ROOT / "worker"):
        for package in root.glob("gridtrain*"):
            files = [
                path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
            ]
            missing = {path.relative_to(root).as_posix() for path in files} - packaged
            assert not missing, f"not in the wheel: {sorted(missing)}"


def test_the_wheel_is_imported_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    """Unpacked and alone on the path, with the interpreter's dependencies but without the checkout."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import gridtrain, gridtrain_coordinator, gridtrain_worker, gridtrain.network.wire, gridtrain.cli\n"
        "print(gridtrain.__version__)\n"
        "for m in (gridtrain, gridtrain_coordinator, gridtrain_worker): print(m.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},  # before site-packages and an editable install's .pth
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    version, *files = done.stdout.splitlines()
    assert wheel.name.startswith(f"gridtrain-{version}-")
    assert all(file.startswith(str(site)) for file in files), files


def test_the_metadata_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info" in name}
    metadata = archive.read(f"{folder}/METADATA").decode()
    for line in (
        "Requires-Python: >=3.11",
        "License-Expression: Apache-2.0",
        "Provides-Extra: coordinator",
        "Provides-Extra: torch",
        "Provides-Extra: worker",
    ):
        assert line in metadata.splitlines(), metadata
    core = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert len(core) == 6 and "torch" not in " ".join(core), core
    assert "gridtrain = gridtrain.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()
