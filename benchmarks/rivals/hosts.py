"""Runs the ranks of a rival, each on a host of the lab, or all on this machine's loopback.

host-0 10.77.0.2   python -m rivals.NAME --rank 0 --master 10.77.0.2:29500 ...
host-1 10.77.0.3   python -m rivals.NAME --rank 1 --master 10.77.0.2:29500 ...
...                           each with the same rate, delay and loss
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.net import Host, Net
from lab.ns import LabError
from rivals.contract import DENSITY, REPEATS, WARMUP, Combined, Result, combine
from rivals.environments import command, train_command

PORT = 29500
TAIL_LINES = 15
TICK_S = 0.05

Ranks = Sequence["subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings of each host's link, in both directions.

    Attributes:
        rate: such as "100Mbit"; empty: no limit.
        delay_s: one way, from any host to any other.
        loss: the share of frames that are lost.
    """

    rate: str = ""
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """The common arguments of all ranks; see `contract.Request`."""

    rival: str
    op: str
    world: int
    n: int
    density: float = DENSITY
    repeats: int = REPEATS
    warmup: int = WARMUP


def hosts_of(net: Net, world: int, links: LinkSettings) -> list[Host]:
    """Make `world` hosts; the first is the master's.  Raises `LabError`, `ValueError`."""
    hosts = [net.host(f"host-{rank}") for rank in range(world)]
    for host in hosts:
        host.shape(up=links.rate, down=links.rate, delay_s=links.delay_s, loss=links.loss)
    return hosts


def measure(hosts: Sequence[Host], job: Job, folder: Path, timeout_s: float, port: int = PORT) -> Combined:
    """Run the job once, one rank on each host.

    Args:
        folder: a new folder for results and logs.
        port: the first of two ports of the master; a job on the same hosts must have other ports.

    Raises `ContractError`, and `LabError` with the ends of the logs if a rank fails or the time is over.
    """
    ranks = []
    for rank, host in enumerate(hosts):
        argv, env = _command(job, rank, f"{hosts[0].address}:{port}", folder, Host.interface)
        ranks.append(host.run(argv, folder, env=env, log=f"rank-{rank}"))
    return _collect(ranks, job, folder, timeout_s)


def measure_on_loopback(job: Job, folder: Path, timeout_s: float) -> Combined:
    """Run the job once over this machine's loopback, without a lab.  Raises as `measure` does."""
    folder.mkdir(parents=True)
    master = f"127.0.0.1:{free_port()}"
    ranks = []
    for rank in range(job.world):
        argv, env = _command(job, rank, master, folder, "lo")
        with (folder / f"rank-{rank}.out").open("wb") as out, (folder / f"rank-{rank}.err").open("wb") as err:
            none = subprocess.DEVNULL
            ranks.append(subprocess.Popen(argv, env=env, stdin=none, stdout=out, stderr=err))
    return _collect(ranks, job, folder, timeout_s)


def train(
    hosts: Sequence[Host],
    trainer: str,
    folder: Path,
    timeout_s: float,
    extra: Sequence[str] = (),
    port: int = PORT,
) -> None:
    """Train with one rank on each host; rank 0 writes steps.jsonl into `folder`, which also has the logs.

    Args:
        extra: further options of `rivals.train`.

    Raises `LabError` with the ends of the logs.
    """
    ranks, master = {}, f"{hosts[0].address}:{port}"
    for rank, host in enumerate(hosts):
        argv, env = train_command(trainer, rank, len(hosts), master, folder, extra, interface=host.interface)
        ranks[rank] = host.run(argv, folder, env=env, log=f"rank-{rank}")
    _watch(ranks, folder, timeout_s)


def _command(
    job: Job, rank: int, master: str, folder: Path, interface: str
) -> tuple[list[str], dict[str, str]]:
    return command(
        job.rival,
        rank,
        job.world,
        master,
        job.op,
        job.n,
        job.density,
        job.repeats,
        job.warmup,
        _result_path(folder, rank),
        interface=interface,
    )


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def free_port() -> int:
    """Return a free port whose successor is free, too, as the contract requires."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def _collect(ranks: Ranks, job: Job, folder: Path, timeout_s: float) -> Combined:
    _watch(dict(enumerate(ranks)), folder, timeout_s)
    return combine([Result.read(_result_path(folder, rank)) for rank in range(job.world)])


def _watch(ranks: Mapping[int, subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    """Wait until all ranks have ended; end all if one fails.  Raises `LabError` with the ends of the logs."""
    try:
        _wait(ranks, folder, timeout_s)
    finally:
        for process in ranks.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(ranks: Mapping[int, subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    waiting, until_s = dict(ranks), time.monotonic() + timeout_s
    while waiting:
        rank, process = next(iter(waiting.items()))
        try:
            process.wait(TICK_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            del waiting[rank]
        failed = [r for r, p in ranks.items() if p.poll() not in (None, 0)]
        if failed:
            raise LabError(
                f"rank {failed[0]} ended with exit code {ranks[failed[0]].poll()}\n{_tails(folder)}"
            )
        if time.monotonic() > until_s:
            raise LabError(f"ranks {sorted(waiting)} still run after {timeout_s:g} s\n{_tails(folder)}")


def _tails(folder: Path) -> str:
    texts = []
    for path in sorted([*folder.glob("rank-*.out"), *folder.glob("rank-*.err")]):
        if lines := path.read_text(errors="replace").splitlines()[-TAIL_LINES:]:
            texts.append("\n".join([f"--- the end of {path.name}:", *lines]))
    return "\n".join(texts)
