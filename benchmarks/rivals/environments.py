"""The rivals' virtual environments, outside the repository, and the processes that run in them.

gloo, which is part of torch, runs in the project's own environment; each other rival has its own.

    $GRIDTRAIN_RIVALS, else $XDG_CACHE_HOME/gridtrain/rivals, else ~/.cache/gridtrain/rivals
        mpi/       mpi4py, numpy; it also needs Open MPI's mpirun on the machine
        hivemind/  hivemind, torch (as in constraints.txt)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rivals.contract import NAMES

BENCHMARKS = Path(__file__).resolve().parents[1]
CONSTRAINTS = BENCHMARKS.parent / "constraints.txt"
INSTALL_TIMEOUT_S = 1200.0
READY = ".ready"
"""A file in a complete environment, with its packages."""

_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Environment:
    """The requirements of a rival.

    Attributes:
        packages: packages of its own environment; empty: it runs in the project's.
        modules: the modules that must be importable there.
        programs: the programs that the machine must have, each with a command that installs it.
    """

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()

    @property
    def recipe(self) -> str:
        return " ".join(self.packages)


# hivemind imports pkg_resources, which newer setuptools do not have.
ENVIRONMENTS = {
    "gloo": Environment(packages=(), modules=("torch.distributed", "numpy")),
    "mpi": Environment(
        packages=("mpi4py>=4", "numpy"),
        modules=("mpi4py.MPI", "numpy"),
        programs=(("mpirun", "on Debian or Ubuntu: apt install --no-install-recommends openmpi-bin"),),
    ),
    "hivemind": Environment(
        packages=("torch", "hivemind==1.1.12", "setuptools<80"), modules=("hivemind", "torch")
    ),
}


def folder() -> Path:
    """Return the folder of all environments, which need not exist."""
    if given := os.environ.get("GRIDTRAIN_RIVALS"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) / "gridtrain" / "rivals" if cache else Path.home() / ".cache" / "gridtrain" / "rivals"


def python(name: str) -> Path:
    """Return the interpreter that runs this rival."""
    return folder() / name / "bin" / "python" if ENVIRONMENTS[name].packages else Path(sys.executable)


def available() -> dict[str, str]:
    """Return for each rival the reason why it cannot run here; empty if it can."""
    return {name: why_not(name) for name in NAMES}


def why_not(name: str) -> str:
    """Return why this rival cannot run here; empty if it can.  It starts no process."""
    environment, place = ENVIRONMENTS[name], folder() / name
    for program, remedy in environment.programs:
        if shutil.which(program) is None:
            return f"there is no command {program!r} ({remedy})"
    if not environment.packages:
        missing = [m for m in environment.modules if importlib.util.find_spec(m.partition(".")[0]) is None]
        return f"{sys.executable} has no {', '.join(missing)}" if missing else ""
    if not (place / READY).exists():
        shown = str(place).replace(str(Path.home()), "~", 1)  # results are published
        return f"not installed in {shown} (python -m rivals setup {name}, in benchmarks/)"
    if (was := (place / READY).read_text()) != environment.recipe:
        needed = f"but needs {environment.recipe!r} (python -m rivals setup {name})"
        return f"{place} was made for {was!r}, {needed}"
    return ""


def setup(names: Sequence[str], say: Callable[[str], None] = print) -> dict[str, str]:
    """Make missing environments.  Return for each rival why it is not available; empty if it is."""
    reasons = {}
    for name in names:
        reasons[name] = why_not(name)
        if reasons[name] and ENVIRONMENTS[name].packages:
            say(f"{name}: installing into {folder() / name}")
            reasons[name] = _make(name)
    return reasons


def _make(name: str) -> str:
    environment, place = ENVIRONMENTS[name], folder() / name
    place.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS)]
    imports = "; ".join(f"import {module}" for module in environment.modules)
    for argv in (
        [sys.executable, "-m", "venv", "--clear", str(place)],
        [*pip, *environment.packages],
        [str(place / "bin" / "python"), "-c", imports],
    ):
        if reason := _failure(argv):
            return reason
    (place / READY).write_text(environment.recipe)
    return why_not(name)


def _failure(argv: Sequence[str]) -> str:
    """Run a command; return the end of its output if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(argv)}: {error}"
    if not done.returncode:
        return ""
    last = " | ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
    return f"{' '.join(argv)}: exit code {done.returncode}: {last}"


def variables(interface: str) -> dict[str, str]:
    """Return this process's environment variables without those of its own interpreter and runs."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GRIDTRAIN_", "PYTHON"))}
    for name_of_run in ("VIRTUAL_ENV", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        inherited.pop(name_of_run, None)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {
        **inherited,
        **one_thread,  # the ranks share this machine's cores
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)]),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }
