"""One dense all-reduce after the other: ours and gloo's, on the same cables, in turns.

Decides what is run and counted.  Touches no model: a round is a synthetic vector through the whole stack that
a training script uses (session, loop, workspace, credits, sockets), and is voted on like any other.

    python benchmarks/ring.py --elements 200000 --topologies ring direct --with-gloo --line 1Gbit
    python benchmarks/ring.py --workers 4 --line 1Gbit --elements 25600000 --rounds 5 --with-gloo

               coordinator + P workers, each on a host of its own          P processes of torch.distributed
    turn 1     round, round, ...                                           all_reduce, all_reduce, ...
    turn 2     ...

Seconds are the slowest rank's of each round, from its submission to its outcome.  CPU seconds are those of
all processes in that time, per GB (1e9 bytes) that one sends and another receives: 2 (P - 1) vectors in all.
The bound is that of Patarasuk and Yuan (2009), 2 (P - 1) / P * bytes / rate, without latencies.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from rivals.contract import leave

HERE = Path(__file__).resolve()
ROUNDS_LEFT_OUT = 1  # connections and memory are new in the first
GLOO_PORT = 29511


@dataclass(frozen=True, slots=True)
class Asked:
    """What one member process is to do."""

    elements: int
    rounds: int
    workers: int
    topology: str = "ring"


def cpu_s() -> float:
    """Of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def contribution(elements: int, rank: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(rank).standard_normal(elements, dtype=np.float32)


# -- inside of one process -----------------------------------------------------------------------


def run_ours(asked: Asked) -> None:
    """A worker of a run, as `gridtrain.join` makes one, but without a model."""
    from gridtrain.config import JoinConfig
    from gridtrain.core.collectives import direct, ring
    from gridtrain.core.messages import LedgerSpec, Setup
    from gridtrain.network.transport.access_control import PeerAllowlist
    from gridtrain.network.transport.identity import Identity
    from gridtrain.network.transport.stack import build_stack
    from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
    from gridtrain.runtime.buffers.star_buffers import make_dense_buffer
    from gridtrain.runtime.client.worker_naming import default_listen_address
    from gridtrain.runtime.group_session import GroupSession

    config = JoinConfig.from_environment(None)
    listen = config.listen or default_listen_address(config.coordinator)
    config = JoinConfig.from_environment(None, listen=listen)
    identity, encrypted = Identity.read(Path(config.identity)), config.unencrypted != "yes"
    gate = PeerAllowlist(bytes.fromhex(config.coordinator_key))
    sockets = ZeroMQTransport(
        identity, "ring benchmark", gate=gate, encrypted=encrypted, plain_anywhere=not encrypted
    )
    session = GroupSession(build_stack(sockets, identity), config, gate)
    session.connection.start()
    session.tasks.attach_state(lambda seat, whole: [b"no", b"state"], lambda blobs: None)
    edges = direct.neighbours if asked.topology == "direct" else ring.neighbours
    spec = LedgerSpec(size=asked.workers, seed=0, steps=asked.rounds)
    session.join(Setup((("vector", f"{asked.elements} float32"),), spec, 1, None), edges)
    mine_N = contribution(asked.elements, int(config.name.rsplit("-", 1)[1]))
    work_N = np.empty_like(mine_N)
    while session.await_turn() is not None:
        while True:
            plan = session.begin()
            if plan is None:
                break
            np.copyto(work_N, mine_N)
            workspace = make_dense_buffer(asked.topology, work_N, plan.world_size)
            began_s, used_s = time.perf_counter(), cpu_s()
            outcome = session.run(plan, [workspace], False, b"")
            report(plan.step, time.perf_counter() - began_s, cpu_s() - used_s, plan.world_size)
            if outcome.is_committed:
                break
            print(f"attempt {plan.attempt} at step {plan.step} was aborted", file=sys.stderr)
    session.wait_for_members()
    session.close()


def run_gloo(asked: Asked, rank: int, master: str) -> None:
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(master, GLOO_PORT, asked.workers, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked.workers)
    mine_N = torch.from_numpy(contribution(asked.elements, rank))
    work_N = torch.empty_like(mine_N)
    for step in range(asked.rounds):
        work_N.copy_(mine_N)
        dist.barrier()
        began_s, used_s = time.perf_counter(), cpu_s()
        dist.all_reduce(work_N)
        report(step, time.perf_counter() - began_s, cpu_s() - used_s, asked.workers)
    dist.barrier()
    dist.destroy_process_group()


def report(step: int, wall_s: float, used_s: float, world_size: int) -> None:
    print(json.dumps({"step": step, "wall_s": wall_s, "cpu_s": used_s, "world_size": world_size}), flush=True)


# -- the lab -------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Of each candidate: (seconds, CPU seconds of all members together) of each counted round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*args.topologies, "gloo")}
    for _ in range(args.turns):
        for topology in args.topologies:
            found[topology] += measure_ours(args, topology)
        if args.with_gloo:
            found["gloo"] += measure_gloo(args)
    return found


def measure_ours(args: argparse.Namespace, topology: str) -> list[tuple[float, float]]:
    from lab.group import Plan, start
    from lab.net import Net

    with TemporaryDirectory(prefix="ring-") as folder, Net() as net:
        plan = Plan(workers=args.workers, encrypted=args.encrypted, line=args.line, environment=_paths())
        argv = [sys.executable, str(HERE), "--inside", "ours", "--topologies", topology, *_common(args)]
        if args.profile:
            argv = [*args.profile.split(), *argv]
        group = start(net, plan, Path(folder), lambda name: argv)
        group.wait(args.limit_s)
        if args.profile:
            print(group.workers["worker-1"].stderr_path.read_text()[-6000:])
        return _counted([process.stdout_path for process in group.workers.values()], args)


def measure_gloo(args: argparse.Namespace) -> list[tuple[float, float]]:
    from lab.net import Net

    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory(prefix="ring-") as folder, Net() as net:
        hosts = [net.host(f"rank-{rank}") for rank in range(args.workers)]
        for host in hosts:
            host.shape(up=args.line, down=args.line)
        processes = []
        for rank, host in enumerate(hosts):
            inside = ["--inside", "gloo", "--rank", str(rank), "--master", hosts[0].address]
            argv = [sys.executable, str(HERE), *inside, *_common(args)]
            processes.append(host.run(argv, Path(folder), env=env))
        for process in processes:
            if process.wait(args.limit_s):
                raise SystemExit(process.stderr_path.read_text())
        return _counted([process.stdout_path for process in processes], args)


def _common(args: argparse.Namespace) -> list[str]:
    counts = ("--elements", args.elements), ("--rounds", args.rounds), ("--workers", args.workers)
    return [str(part) for pair in counts for part in pair]


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def _counted(outputs: Sequence[Path], args: argparse.Namespace) -> list[tuple[float, float]]:
    of_step: dict[int, list[tuple[float, float]]] = {}
    for path in outputs:
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                of_step.setdefault(row["step"], []).append((row["wall_s"], row["cpu_s"]))
    whole = {step: rows for step, rows in of_step.items() if len(rows) == args.workers}
    return [
        (max(wall_s for wall_s, _ in rows), sum(used_s for _, used_s in rows))
        for step, rows in sorted(whole.items())
        if step >= ROUNDS_LEFT_OUT
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--elements", type=int, default=25_600_000)
    parser.add_argument("--rounds", type=int, default=4, help=f"the first {ROUNDS_LEFT_OUT} is not counted")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument(
        "--topologies", nargs="+", choices=("ring", "direct"), default=["ring"], help="of ours"
    )
    parser.add_argument("--line", default="", help='each cable\'s rate, such as "1Gbit"; default: no limit')
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--with-gloo", action="store_true")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--profile", default="", help="words before the worker's command")
    parser.add_argument("--inside", choices=("ours", "gloo"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    asked = Asked(args.elements, args.rounds, args.workers, args.topologies[0])
    if args.inside == "ours":
        run_ours(asked)
    elif args.inside == "gloo":
        run_gloo(asked, args.rank, args.master)
        leave()
    else:
        show(args, measure(args))


def show(args: argparse.Namespace, found: dict[str, list[tuple[float, float]]]) -> None:
    from gridtrain.network.transport.rate_limiter import parse_rate

    share = 2 * (args.workers - 1) / args.workers
    moved_GB = share * args.elements * 4 * args.workers / 1e9  # sent by all; as much is received
    bound_s = share * args.elements * 4 / parse_rate(args.line) if args.line else None
    for name, rounds in found.items():
        if not rounds:
            continue
        walls, used = [wall_s for wall_s, _ in rounds], [cpu for _, cpu in rounds]
        text = f"{name:6} P={args.workers} n={args.elements} {args.line or 'no limit'} "
        text += "CURVE" if args.encrypted and name != "gloo" else "plain"
        text += f": {len(rounds)} rounds, seconds min {min(walls):.4f} median {statistics.median(walls):.4f}"
        if bound_s is not None:
            text += f" = x bound {min(walls) / bound_s:.3f} {statistics.median(walls) / bound_s:.3f}"
        text += f"; CPU s per GB sent and received: min {min(used) / moved_GB:.2f} "
        text += f"median {statistics.median(used) / moved_GB:.2f}; CPU ms a process: median "
        print(text + f"{statistics.median(used) / args.workers * 1e3:.2f}")


if __name__ == "__main__":
    main()
