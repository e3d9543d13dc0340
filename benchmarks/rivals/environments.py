"""Where the rivals live: a virtual environment for each, made once, outside the repository.

Decides what is installed and how a rank is started.  Never touches the project's own environment: gloo, which
is part of torch, runs in it as it is; everything else gets its own.

    $GRIDTRAIN_RIVALS, else $XDG_CACHE_HOME/gridtrain/rivals, else ~/.cache/gridtrain/rivals
        mpi/       mpi4py, numpy           and, of the machine, Open MPI's mpirun
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

from rivals.contract import DENSITY, INTERFACE, NAMES, OPS, REPEATS, TRAINERS, WARMUP, ContractError, Request

BENCHMARKS = Path(__file__).resolve().parents[1]
CONSTRAINTS = BENCHMARKS.parent / "constraints.txt"
TRY_TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 1200.0
READY = ".ready"
"""In an environment: holds what was tried in it, once that has worked."""

_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Environment:
    """What a rival needs.

    Attributes:
        packages: for pip, in an environment of its own; empty: it runs in ours.
        modules: what must be importable there.
        programs: of the machine: the name and what to install for it.
    """

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()


# hivemind is compiled against an older protobuf and reads pkg_resources, which newer setuptools have dropped.
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
    """Where all environments are; need not exist."""
    if given := os.environ.get("GRIDTRAIN_RIVALS"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) / "gridtrain" / "rivals" if cache else Path.home() / ".cache" / "gridtrain" / "rivals"


def python(name: str) -> Path:
    """The interpreter that runs this rival."""
    return folder() / name / "bin" / "python" if ENVIRONMENTS[name].packages else Path(sys.executable)


# -- is it there? --------------------------------------------------------------------------------


def available() -> dict[str, str]:
    """For each rival the reason why it cannot run here; empty: it can."""
    return {name: why_not(name) for name in NAMES}


def why_not(name: str) -> str:
    """Why this rival cannot run here; empty: it can.  Reads what is there, starts nothing."""
    environment = ENVIRONMENTS[name]
    for program, remedy in environment.programs:
        if shutil.which(program) is None:
            return f"there is no command {program!r} ({remedy})"
    if not environment.packages:
        missing = [m for m in environment.modules if importlib.util.find_spec(m.partition(".")[0]) is None]
        return f"{sys.executable} has no {', '.join(missing)}" if missing else ""
    place = folder() / name
    if not (place / READY).exists():
        return f"not installed in {place} (python -m rivals setup {name}, in benchmarks/)"
    if (was := (place / READY).read_text()) != _recipe(environment):
        needed = _recipe(environment)
        return f"{place} was made for {was!r}, {needed!r} is needed (python -m rivals setup {name})"
    return ""


def _recipe(environment: Environment) -> str:
    return " ".join(environment.packages)


# -- made ----------------------------------------------------------------------------------------


def setup(names: Sequence[str], say: Callable[[str], None] = print) -> dict[str, str]:
    """Make what is missing.  Returns for each rival the reason why it could not be; empty: it is there."""
    reasons = {}
    for name in names:
        if ENVIRONMENTS[name].packages and why_not(name):
            say(f"{name}: installing into {folder() / name}")
            reasons[name] = _make(name)
        else:
            reasons[name] = why_not(name)
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
    (place / READY).write_text(_recipe(environment))
    return why_not(name)


def _failure(argv: Sequence[str]) -> str:
    """Run it; its last words if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(argv)}: {error}"
    if not done.returncode:
        return ""
    last = " | ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
    return f"{' '.join(argv)}: exit code {done.returncode}: {last}"


# -- started -------------------------------------------------------------------------------------


def command(
    name: str,
    rank: int,
    world: int,
    master: str,
    op: str,
    n: int,
    density: float = DENSITY,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    out: Path = Path("result.json"),
    *,
    interface: str = INTERFACE,
    prefix: Sequence[str] = (),
    threads: int = 1,
) -> tuple[list[str], dict[str, str]]:
    """How to start one rank: (argv, the whole environment).  All arguments are `Request`'s, and:

    Args:
        prefix: goes before it, such as ("ip", "netns", "exec", NAMESPACE); nothing is needed for
            `lab.net.Host.run`, which enters the host by itself.
        threads: of each rank's arithmetic; the ranks share this machine's cores.

    Raises `ContractError` if the request makes no sense or the rival cannot do it.
    """
    if op not in OPS.get(name, {}):
        can = ", ".join(f"{rival} {known}" for rival, ops in OPS.items() for known in ops)
        raise ContractError(f"{name} has no operation {op!r}; there are: {can}")
    request = Request(rank, world, master, op, n, out.resolve(), density, repeats, warmup, interface)
    argv = [*prefix, str(python(name)), "-m", f"rivals.{name}", *request.to_arguments()]
    return argv, environment_of(name, interface, threads)


def train_command(
    trainer: str,
    rank: int,
    world: int,
    master: str,
    folder: Path,
    extra: Sequence[str] = (),
    *,
    interface: str = INTERFACE,
    prefix: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """How to start one rank of a training run, `rivals.train`: (argv, the whole environment).

    Args:
        trainer: one of `contract.TRAINERS`.
        folder: where rank 0 writes steps.jsonl.
        extra: further options, such as ("--until-loss", "2.5", "--settings", "adamw").
    """
    words = ["--rival", trainer, "--rank", str(rank), "--world", str(world), "--master", master]
    words += ["--interface", interface, "--folder", str(folder.resolve()), *extra]
    name = TRAINERS[trainer]
    return [*prefix, str(python(name)), "-m", "rivals.train", *words], environment_of(name, interface)


def environment_of(name: str, interface: str, threads: int = 1) -> dict[str, str]:
    """Ours without what belongs to our own interpreter and runs."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GRIDTRAIN_", "PYTHON"))}
    for mine in ("VIRTUAL_ENV", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        inherited.pop(mine, None)
    few = {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {
        **inherited,
        **few,
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)]),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }
