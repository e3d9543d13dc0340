"""Result files: what was measured, by which command, when, on which kind of machine (without its name)."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine(device: str = "cuda") -> dict[str, Any]:
    """Describe the kind of machine, without names, and its GPU, if `device` is one."""
    info = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "processor": _processor(),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "congestion": _read(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
        "python": platform.python_version(),
        "gpu": _gpu(device),
        **{name: _version(name) for name in ("torch", "triton", "numpy")},
    }
    return {name: value for name, value in info.items() if value}


def _processor() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpu(device: str) -> str:
    try:
        import torch
    except ImportError:
        return ""
    is_gpu = device.startswith("cuda") and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_gpu else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def command(arguments: Sequence[str] | None = None) -> str:
    """Return this program's command line, without the file or folder of its results (`--out`)."""
    kept = list(sys.argv[1:] if arguments is None else arguments)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return shlex.join(["python", *program(), *kept])


def program() -> list[str]:
    """Return how Python was told to run this program: a file, or -m and a module."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return ["-m", main.__spec__.name.removesuffix(".__main__")]
    return [Path(str(main.__file__)).name]


def parser(about: str | None, out: str = "file for the figures") -> argparse.ArgumentParser:
    """Return a parser of a program's options, with `--out` unless its help `out` is empty."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        prog=shlex.join(["python", *program()]), description=about, formatter_class=raw
    )
    if out:
        made.add_argument("--out", type=Path, metavar="FILE", help=out)
    return made


def write(path: Path | None, arguments: Sequence[str] | None = None, **content: Any) -> None:
    """Write a result file with its origin; nothing if there is no path."""
    if path is not None:
        made = {"command": command(arguments), "date": f"{datetime.date.today()}", "machine": machine()}
        replace(path, json.dumps({**made, **content}, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown; floats have four digits, None is empty."""
    lines = [list(heads), ["---"] * len(heads), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    shown = f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return shown.replace("|", "\\|").replace("\n", " ")
