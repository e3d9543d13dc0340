"""Runs the ranks of a rival, each on a host of the lab, or all on this machine's loopback.

host-0 10.77.0.2   python -m rivals.NAME '{"rank": 0, "master": "10.77.0.2:29500", ...}'
host-1 10.77.0.3   python -m rivals.NAME '{"rank": 1, "master": "10.77.0.2:29500", ...}'

Open MPI's ranks are started by mpirun on the first host, which enters the others' namespaces instead of using
ssh; on loopback it starts all processes itself.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gridtrain.tools.bench.bench_group import start_process
from gridtrain.tools.child_processes import end_processes, log_tail
from lab.net import Host
from lab.ns import LabError
from rivals import environments
from rivals.contract import Rank, Request, Result, combine

PORT = 29500
TAIL_LINES = 15
TICK_S = 0.05
MPI_RING = 4
"""Open MPI's number of the ring algorithm of Allreduce."""


class Loopback:
    """This machine, on which all ranks share an interface."""

    address, interface = "127.0.0.1", "lo"

    def run(
        self, argv: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, log: str = ""
    ) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True, exist_ok=True)
        return start_process(argv, folder / log, env or {})


RankHost = Host | Loopback


def measure(
    hosts: Sequence[RankHost],
    rival: str,
    request: Request,
    folder: Path,
    timeout_s: float,
    port: int = PORT,
) -> Result:
    """Measure an operation once, one rank on each host.  Arguments and errors are those of `run_ranks`."""
    launcher = mpirun(hosts, request.op, folder) if rival == "mpi" else ()
    outs = run_ranks(hosts, rival, f"rivals.{rival}", request, folder, timeout_s, port, launcher)
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


def run_ranks(
    hosts: Sequence[RankHost],
    rival: str,
    module: str,
    common: Rank,
    folder: Path,
    timeout_s: float,
    port: int = PORT,
    launcher: Sequence[str] = (),
) -> list[str]:
    """Run a module in the rival's interpreter on each host until all have ended; end all if one fails.

    Args:
        common: the fields of all ranks that do not depend on the hosts.
        folder: a folder for results and logs.
        port: the port of the master; other ranks on the same hosts must have other ports.
        launcher: a program on the first host that starts the interpreters of all ranks.

    Returns the ranks' `out`.  Raises `LabError` with the ends of the logs.
    """
    common = replace(
        common, world=len(hosts), master=f"{hosts[0].address}:{port}", interface=hosts[0].interface
    )
    outs = [str(folder.resolve() / f"rank-{rank}.json") for rank in range(len(hosts))]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts[:1] if launcher else hosts):
            own = replace(common, rank=rank, out=outs[rank])
            argv = [*launcher, str(environments.python(rival)), "-m", module, own.to_text()]
            env = environments.variables(host.interface)
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
    return outs


def _tails(folder: Path) -> str:
    logs = sorted([*folder.glob("rank-*.out"), *folder.glob("rank-*.err")])
    return "\n".join(log_tail(log.name, [log], TAIL_LINES) for log in logs if log.stat().st_size)
