"""Runs the ranks of a rival, each on a host of the lab, or all on this machine's loopback.

host-0 10.77.0.2   python -m rivals.NAME --rank 0 --master 10.77.0.2:29500 ...
host-1 10.77.0.3   python -m rivals.NAME --rank 1 --master 10.77.0.2:29500 ...

Open MPI's ranks are started by mpirun on the first host, which enters the others' namespaces instead of using
ssh; on loopback it starts all processes itself.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gridtrain.tools.bench.bench_group import start_process
from gridtrain.tools.child_processes import end_processes, log_tail
from lab.net import Host
from lab.ns import LabError
from rivals import environments
from rivals.contract import TRAINERS, Request, Result, combine

PORT = 29500
TAIL_LINES = 15
TICK_S = 0.05
MPI_RING = 4
"""Open MPI's number of the ring algorithm of Allreduce."""


class RankHost(Protocol):
    """Where a rank runs: `lab.net.Host`, or this machine (`Loopback`)."""

    @property
    def address(self) -> str: ...

    @property
    def interface(self) -> str: ...

    def run(
        self, argv: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, log: str = ""
    ) -> subprocess.Popen[bytes]: ...


class Loopback:
    """This machine, on which all ranks share an interface."""

    address, interface = "127.0.0.1", "lo"

    def run(
        self, argv: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, log: str = ""
    ) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True, exist_ok=True)
        return start_process(argv, folder / log, env or {})


def measure(
    hosts: Sequence[RankHost], rival: str, request: Request, folder: Path, timeout_s: float, port: int = PORT
) -> Result:
    """Measure an operation once, one rank on each host.

    Args:
        request: of all ranks, except for what depends on the hosts (rank, world, master, interface, out).
        folder: a folder for results and logs.
        port: the first of two ports of the master; a measurement on the same hosts must have other ports.

    Raises `ContractError`, and `LabError` with the ends of the logs if a rank fails or the time is over.
    """
    outs = [folder / f"rank-{rank}.json" for rank in range(len(hosts))]
    master = f"{hosts[0].address}:{port}"
    common = replace(request, world=len(hosts), master=master, interface=hosts[0].interface)
    commands = [
        ["-m", f"rivals.{rival}", *replace(common, rank=rank, out=out.resolve()).to_arguments()]
        for rank, out in enumerate(outs)
    ]
    if rival == "mpi":
        run_ranks(hosts[:1], rival, commands[:1], folder, timeout_s, mpirun(hosts, request.op, folder))
    else:
        run_ranks(hosts, rival, commands, folder, timeout_s)
    return combine([Result.read(out) for out in outs])


def mpirun(hosts: Sequence[RankHost], op: str, folder: Path) -> list[str]:
    """Return mpirun and its options, which a rank's command follows."""
    interface = hosts[0].interface
    settings = {
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": interface,
        "oob_tcp_if_include": interface,
        "mpi_yield_when_idle": "1",  # several ranks share a core here
    }
    if op == "all_reduce":
        settings |= {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": str(MPI_RING)}
    argv = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-n", str(len(hosts))]
    machines = [host for host in hosts if isinstance(host, Host)]
    if machines:
        folder.mkdir(parents=True, exist_ok=True)
        agent = folder / "agent"
        enter = 'exec ip netns exec $space unshare --uts sh -c \'hostname $0; eval "$1"\' $host "$*"'
        spaces = "\n".join(f"{host.name}) space={host.namespace};;" for host in machines)
        agent.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{spaces}\nesac\n{enter}\n")
        agent.chmod(0o700)
        settings |= {"plm_rsh_agent": str(agent.resolve()), "plm_rsh_no_tree_spawn": "1"}
        argv += ["--host", ",".join(f"{host.name}:1" for host in machines), "--map-by", "node"]
    return argv + [word for name, value in settings.items() for word in ("--mca", name, value)]


def request_of(op: str, n: int, **options: float) -> Request:
    """Return a request for `measure`."""
    return Request(0, 1, "host:1", op, n, Path(), **options)  # type: ignore[arg-type]


def train(
    hosts: Sequence[RankHost], trainer: str, folder: Path, timeout_s: float, extra: Sequence[str] = ()
) -> None:
    """Train with one rank on each host; rank 0 writes steps.jsonl into `folder`, which also has the logs.

    Args:
        trainer: one of `contract.TRAINERS`.
        extra: further options of `rivals.train`, such as ("--until-loss", "2.5").

    Raises `LabError` with the ends of the logs.
    """
    common = ["--rival", trainer, "--world", str(len(hosts)), "--master", f"{hosts[0].address}:{PORT}"]
    common += ["--interface", hosts[0].interface, "--folder", str(folder.resolve()), *extra]
    commands = [["-m", "rivals.train", "--rank", str(rank), *common] for rank in range(len(hosts))]
    run_ranks(hosts, TRAINERS[trainer], commands, folder, timeout_s)


def run_ranks(
    hosts: Sequence[RankHost],
    rival: str,
    commands: Sequence[Sequence[str]],
    folder: Path,
    timeout_s: float,
    launcher: Sequence[str] = (),
) -> None:
    """Run a command of the rival's interpreter on each host until all have ended; end all if one fails.

    Args:
        launcher: a program before the interpreter, which starts it.

    Raises `LabError` with the ends of the logs.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, (host, arguments) in enumerate(zip(hosts, commands, strict=True)):
            env = environments.variables(host.interface)
            argv = [*launcher, str(environments.python(rival)), *arguments]
            ranks.append(host.run(argv, folder, env=env, log=f"rank-{rank}"))
        until_s = time.monotonic() + timeout_s
        while None in (codes := [process.poll() for process in ranks]) and not any(codes):
            if time.monotonic() > until_s:
                waiting = [rank for rank, code in enumerate(codes) if code is None]
                raise LabError(f"ranks {waiting} still run after {timeout_s:g} s\n{_tails(folder)}")
            time.sleep(TICK_S)
        if failed := [rank for rank, code in enumerate(codes) if code]:
            code = codes[failed[0]]
            raise LabError(f"rank {failed[0]} ended with exit code {code}\n{_tails(folder)}")
    finally:
        end_processes(ranks)


def _tails(folder: Path) -> str:
    logs = sorted([*folder.glob("rank-*.out"), *folder.glob("rank-*.err")])
    return "\n".join(log_tail(log.name, [log], TAIL_LINES) for log in logs if log.stat().st_size)
