"""Starts an MPI job on hosts without sshd: each rank's process is the agent of its host.

The job is mpi_job.py.  This module must not import MPI, because a process that has initialized MPI cannot
start mpirun.

    rank 0's process                            rank R's process
      rendezvous  <---- host name, arguments ----  rendezvous
      mpirun
        `- agent HOST COMMAND (mpi_agent.py)
             --unix socket--> rank 0's process --- COMMAND ---> runs it: Open MPI's daemon, which starts the
      ...                                                        job's process on this host
      mpirun has ended  --------- done ---------> exits with the same code

On loopback mpirun starts all processes itself; they use TCP, too.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rivals.contract import ContractError, Request, parse
from rivals.rendezvous import Rendezvous

ARGUMENTS = "RIVALS_MPI_ARGUMENTS"
"""An environment variable of the job's processes: the command lines of all ranks, as JSON."""

RING = 4
"""Open MPI's number of the ring algorithm of Allreduce."""

LONGEST_COMMAND_BYTES = 1 << 16


def launch(request: Request) -> int:
    """Take part as one rank; return the job's exit code.  Raises `ContractError`."""
    with Rendezvous(request) as group:
        host = socket.gethostname()
        ranks = group.exchange([host, request.to_arguments()])
        os.environ[ARGUMENTS] = json.dumps([arguments for _, arguments in ranks])
        hosts = [name for name, _ in ranks]
        local = request.interface == "lo"
        if not local and len(set(hosts)) < request.world:
            remedy = "give each rank's process its own host name (unshare --uts)"
            raise ContractError(f"the hosts' names are {hosts}; Open MPI needs different ones: {remedy}")
        if request.rank:
            return _serve(group)
        code = _mpirun(request, group, [] if local else hosts)
        for rank in range(1, request.world):
            group.send(rank, {"done": code})
        return code


def _serve(group: Rendezvous) -> int:
    """Run the commands that rank 0 sends, until the job has ended."""
    while True:
        request = group.receive(0)
        if "done" in request:
            return int(request["done"])
        subprocess.run(["sh", "-c", request["run"]], stdin=subprocess.DEVNULL, check=True)


def _mpirun(request: Request, group: Rendezvous, hosts: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="rivals-mpi-") as folder:
        path = str(Path(folder, "agents"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            argv = [*options(request, hosts, path), sys.executable, "-m", "rivals.mpi_job"]
            with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as mpirun:
                ended = os.pidfd_open(mpirun.pid)
                try:
                    while ended not in select.select([listener.fileno(), ended], [], [])[0]:
                        _forward(listener, group, hosts)
                finally:
                    os.close(ended)
            return mpirun.returncode


def options(request: Request, hosts: list[str], agents: str) -> list[str]:
    """Return mpirun and its options.

    Args:
        hosts: the hosts' names; empty on loopback.
        agents: the path of the agents' socket.
    """
    settings = {
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": request.interface,
        "oob_tcp_if_include": request.interface,
        "mpi_yield_when_idle": "1",  # several ranks share a core here
    }
    if request.op == "all_reduce":
        settings |= {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": str(RING)}
    argv = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-n", str(request.world)]
    if hosts:
        agent = shlex.join([sys.executable, "-m", "rivals.mpi_agent", agents])
        settings |= {"plm_rsh_agent": agent, "plm_rsh_no_tree_spawn": "1"}
        argv += ["--host", ",".join(f"{host}:1" for host in hosts), "--map-by", "node"]
    for name, value in settings.items():
        argv += ["--mca", name, value]
    return argv


def _forward(listener: socket.socket, group: Rendezvous, hosts: list[str]) -> None:
    """Send an agent's command to the rank on its host."""
    with listener.accept()[0] as connection, connection.makefile("rwb") as agent:
        host, command = json.loads(agent.readline(LONGEST_COMMAND_BYTES))
        group.send(hosts.index(host), {"run": command})
        agent.write(b"\n")


if __name__ == "__main__":
    sys.exit(launch(parse("mpi")))
