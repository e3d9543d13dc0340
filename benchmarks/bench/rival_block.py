"""A rival's group on the hosts of a link: one process for each rank, started again for each block of repeats.

The rival's own script measures it (`rivals.contract`).

    worker-1   python -m rivals.gloo --rank 0 --world 4 --master 10.77.0.3:29500 ... --out 0.json
    worker-2   python -m rivals.gloo --rank 1 ...
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.link_hosts import Namespaces
from bench.results import Sample
from gridtrain.errors import GridtrainError
from gridtrain.tools.bench.bench_group import member_log_tail
from gridtrain.tools.child_processes import end_processes

FIRST_PORT = 29500
PORTS_EACH = 20
"""Ports of one group: the master's and a few above it.  The groups of a link run in turn."""

START_S = 180.0
REPEAT_S = 120.0


def missing() -> dict[str, str]:
    """Return for each known rival why it cannot run here, "" if it can; {} if there are no rivals."""
    if importlib.util.find_spec("rivals") is None:
        return {}
    found: dict[str, str] = _environments().available()
    return found


def why_not(cell: Cell, reasons: Mapping[str, str]) -> str:
    """Return why this cell's rival is left out; empty if it can run."""
    if cell.rival not in reasons:
        return f"rivals not installed: {cell.rival}" if not reasons else f"there is no rival {cell.rival!r}"
    return reasons[cell.rival]


class RivalBlock:
    """A block of repeats of one rival's operation.

    Args:
        number: the number of the block on these hosts, which determines its ports.
    """

    def __init__(self, cell: Cell, hosts: Namespaces, folder: Path, number: int) -> None:
        self.cell, self.hosts, self.folder = cell, hosts, folder
        self.master = f"{hosts.address('worker-1')}:{FIRST_PORT + PORTS_EACH * number}"

    def run(self, repeats: int, warmup: int) -> list[Sample]:
        """Return the samples.  Raises `GridtrainError` with the last lines of the logs."""
        self.folder.mkdir(parents=True)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(self.cell.link.workers):
                argv, env = _command(self, rank, repeats, warmup)
                log = self.folder / f"rank-{rank}"
                processes.append(self.hosts.run(f"worker-{rank + 1}", argv, log, env))
            self._wait(processes, START_S + REPEAT_S * (repeats + warmup))
        finally:
            end_processes(processes)
        return self._samples()

    def out(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        for rank, process in enumerate(processes):
            try:
                code: int | None = process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                failure = "did not end in time" if code is None else f"ended with exit code {code}"
                log_tail = member_log_tail(self.folder / f"rank-{rank}")
                text = f"{self.cell.what}: rank {rank} {failure}\n{log_tail}"
                raise GridtrainError(text, remedy=f"see the complete logs in {self.folder}")

    def _samples(self) -> list[Sample]:
        contract = importlib.import_module("rivals.contract")
        try:
            ranks = [contract.Result.read(self.out(rank)) for rank in range(self.cell.link.workers)]
            whole = contract.combine(ranks)
        except contract.ContractError as error:
            raise GridtrainError(f"{self.cell.what}: {error}", remedy=f"look into {self.folder}") from None
        sent = whole.bytes_sent or [None] * len(whole.seconds)
        note = "; ".join(filter(None, (whole.version, contract.OPS[whole.rival][whole.op], whole.note)))
        return [
            Sample(seconds=seconds, cpu_s=cpu_s, sent_bytes=sent_bytes, note=note)
            for seconds, cpu_s, sent_bytes in zip(whole.seconds, whole.cpu_s, sent, strict=True)
        ]


def _command(block: RivalBlock, rank: int, repeats: int, warmup: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of the rival's own interpreter, and its whole environment."""
    made: tuple[list[str], dict[str, str]] = _environments().command(
        block.cell.rival,
        rank,
        block.cell.link.workers,
        block.master,
        block.cell.op,
        block.cell.n,
        density=block.cell.density,
        repeats=repeats,
        warmup=warmup,
        out=block.out(rank),
        interface=block.hosts.interface,
    )
    return made


def _environments() -> Any:
    """Import `rivals.environments` at run time, because rivals are optional."""
    return importlib.import_module("rivals.environments")
