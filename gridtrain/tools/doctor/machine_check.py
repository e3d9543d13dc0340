"""Doctor's checks of this machine: Python, torch, GPU, free memory, disk and missing packages.

torch is imported in another process with a deadline: an import can be slow, and a driver can hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gridtrain.errors import ConfigError
from gridtrain.extras import install_command, require_packages
from gridtrain.network.transport.zmq.congestion_control import slow_restart
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain.runtime.free_memory import free_memory_bytes
from gridtrain.tools.doctor.findings import Finding, failure, ok, warning
from gridtrain.tools.options.runfile import read_requires

MIN_PYTHON = (3, 11)
LITTLE_MEMORY_BYTES = 4 << 30
LITTLE_DISK_BYTES = 2 << 30
BAD_DISK_BYTES = 200 << 20
POLL_S = 0.05

TORCH_PROBE = """
import json
def at(stage): print(json.dumps({"at": stage}), flush=True)
at("import")
try:
    import torch
except ImportError as error:
    print(json.dumps({"missing": str(error)}))
    raise SystemExit
found = {"version": torch.__version__, "cuda_build": torch.version.cuda or "", "gpus": []}
try:
    import safetensors
except ImportError:
    found["no_safetensors"] = True
device = "cpu"
at("gpu")
if torch.cuda.is_available():
    device = "cuda"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["gpus"].append([torch.cuda.get_device_name(index), free, total])
elif torch.backends.mps.is_available():
    device = "mps"
at("product")
from gridtrain.device_speed import device_flops
found |= {"device": device, "flops": device_flops(torch.device(device))}
print(json.dumps(found))
"""
"""The program that the other process runs.

It prints its progress and then its results, one JSON object per line; "flops" is the speed of the device in
float32 operations per second.
"""

INSTALL_HINT = f"{install_command('torch')} (but first install the torch build for your GPU from pytorch.org)"


def check_python() -> Finding:
    ours = platform.python_version()
    figures = {"version": ours, "platform": sys.platform}
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return failure("python", f"Python {ours}", f"install Python {wanted} or newer", **figures)
    return ok("python", f"Python {ours} on {sys.platform}, {_cores()} CPU cores", **figures, cores=_cores())


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


class TorchProbe:
    """A process that imports torch and measures the device's speed.  Start it early: it is the slowest check.

    Args:
        command: the command of the process, which tests replace.
    """

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-c", TORCH_PROBE)) -> None:
        self._began_s = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self) -> None:
        """Terminate the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def findings(self, until_s: float) -> tuple[list[Finding], float | None]:
        """Wait for the process until `until_s` (`time.monotonic`); return the findings and the speed.

        The device's speed is in floating-point operations per second; None if it is unknown.
        """
        try:
            out, err = self._process.communicate(timeout=max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            self.end()
            return [_late(late.output, time.monotonic() - self._began_s)], None
        try:
            found = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            last = (err.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1][:200]
            return [failure("torch", f"torch cannot be used: {last}", INSTALL_HINT)], None
        return _torch_findings(found)


def _late(said: bytes | str | None, took_s: float) -> Finding:
    """Return the finding about a process that has not finished in time.

    It is a failure if torch is not installed, or if a GPU driver does not answer, because training would also
    hang.  Otherwise it is a warning, because importing torch takes long on a busy machine.
    """
    text = said.decode(errors="replace") if isinstance(said, bytes) else said or ""
    at = ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            at = json.loads(line)["at"]
    was_imported = at in ("gpu", "product")  # even if its version is unknown
    here = _installed() or ("torch" if was_imported else "")
    if at == "gpu":
        check = "python -c 'import torch; print(torch.cuda.is_available())'"
        return failure(
            "torch", f"{here}: its GPU driver does not answer within {took_s:.0f} s", f"run {check}"
        )
    if not here:
        return failure("torch", "torch is not installed here", INSTALL_HINT)
    doing = "is still computing" if at == "product" else "is still being imported"
    return warning(
        "torch",
        f"slow: {here} {doing} after {took_s:.0f} s, so its speed is unknown",
        "close other programs and try again; if torch stays slow, run python -X importtime -c 'import torch'",
        took_s=took_s,
    )


def _installed() -> str:
    """Return the name and version of the installed torch without importing it; "" if there is none."""
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return ""


def _torch_findings(found: dict[str, Any]) -> tuple[list[Finding], float | None]:
    if "missing" in found:
        return [failure("torch", f"torch is not installed here ({found['missing']})", INSTALL_HINT)], None
    flops = float(found["flops"])
    named = f"torch {found['version']}"
    findings = [
        failure("torch", f"{named}, but no safetensors", "pip install safetensors")
        if found.get("no_safetensors")
        else ok(
            "torch",
            f"{named} on {found['device']}: {flops / 1e9:,.0f} Gflop/s in float32",
            version=found["version"],
            device=found["device"],
            flops=flops,
        )
    ]
    for index, (name, free, total) in enumerate(found["gpus"]):
        text = f"{name}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        figures = {"gpu": index, "free_bytes": free, "total_bytes": total}
        if free < 0.5 * total:
            fix = "close the program that uses it, or run gridtrain worker set gpu=pause"
            findings.append(warning("gpu", f"{text}; another program uses it", fix, **figures))
        else:
            findings.append(ok("gpu", text, **figures))
    if not found["gpus"]:
        if found["device"] == "mps":
            findings.append(ok("gpu", "Apple's GPU"))
        elif found["cuda_build"]:
            fix = (
                "install or update NVIDIA's driver; nvidia-smi should list the GPU; otherwise the CPU is used"
            )
            findings.append(
                warning("gpu", f"torch is built for CUDA {found['cuda_build']}, but finds no GPU", fix)
            )
        elif Path("/proc/driver/nvidia/version").exists():
            fix = "install a torch build for CUDA from pytorch.org"
            findings.append(
                warning("gpu", "there is an NVIDIA driver, but this torch build supports only the CPU", fix)
            )
        else:
            findings.append(ok("gpu", "torch cannot use a GPU; the CPU is used"))
    return findings, flops


def check_memory(free_bytes: Callable[[], int] = free_memory_bytes) -> Finding:
    """Check the free memory; tests replace `free_bytes`, which returns 0 if the amount is unknown."""
    free = free_bytes()
    if not free:
        return warning(
            "memory", "this system does not report how much memory is free", "check the free memory yourself"
        )
    text = f"{free / 2**30:.1f} GiB of memory free"
    if free < LITTLE_MEMORY_BYTES:
        fix = "close other programs, because model, gradient and residual need memory"
        return warning("memory", text, fix, free_bytes=free)
    return ok("memory", text, free_bytes=free)


def check_disk(run: str) -> Finding:
    """Check the free space for checkpoints and the final model."""
    folder = state_directory(run)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / 1e9:.1f} GB free for checkpoints in {folder}"
    if not os.access(there, os.W_OK):
        fix = "set XDG_STATE_HOME to a folder that you may write to"
        return failure("disk", f"{folder} cannot be written to", fix, free_bytes=free)
    if free < BAD_DISK_BYTES:
        fix = "free space on the disk, or set XDG_STATE_HOME to a folder on another disk"
        return failure("disk", text, fix, free_bytes=free)
    if free < LITTLE_DISK_BYTES:
        fix = "free space on the disk, or choose another folder with --state-dir"
        return warning("disk", text, fix, free_bytes=free)
    return ok("disk", text, free_bytes=free)


def check_tcp_restart(control: str | None = None) -> Finding:
    """Check whether TCP reduces its rate after each pause.

    Args:
        control: a result of `slow_restart`, for tests; None to call it.
    """
    control = slow_restart() if control is None else control
    if control:
        fix = "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0 (and in /etc/sysctl.d, to keep it)"
        text = f"TCP ({control}) starts slowly after each pause: sparse exchanges take up to twice as long"
        return warning("tcp", text, fix, control=control)
    return ok("tcp", "TCP keeps its speed after pauses, as far as this system reports")


def check_packages(bundle: object) -> list[Finding]:
    """Check whether the packages that a run's bundle requires are installed; return [] if it requires none.

    Args:
        bundle: the entry about the bundle in the run's status.
    """
    try:
        required = read_requires(Path("the run's status"), bundle if isinstance(bundle, dict) else {})
        require_packages(required, "the run's script")
    except ConfigError as error:
        return [failure("packages", error.reason, error.remedy)]
    names = ", ".join(f"{name} {version(name)}" for name, _ in required)
    return [ok("packages", f"installed for the run's script: {names}")] if names else []
