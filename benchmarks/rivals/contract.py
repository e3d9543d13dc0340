"""The interface of a rival: a JSON object on the command line, and a JSON file of each rank.

It needs only the standard library, because each rival's own interpreter runs it, without gridtrain.

    harness --argv--> python -m rivals.NAME '{"rank": 0, "world": 4, "op": "all_reduce", ...}'   a `Rank`
    harness <--FILE-- {"rival", "version", "op", "n", "world", "rank", "seconds": [...], "cpu_s": [...], ...}

All ranks of a group get the same object except `rank` and `out`; rank 0 runs on the host of `master`, where
the group uses the port PORT.  A rank that exits with 0 has written its file; a group's time of
a repeat is the longest of its ranks (`combine`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn, Self

import record

OPS: dict[str, dict[str, str]] = {
    "gloo": {
        "all_reduce": "dense sum of n float32, gloo's own choice of algorithm",
        "all_gather": "TopK: all-gather of k (index, value) pairs, 8 bytes each; summed after the clock",
    },
    "mpi": {
        "all_reduce": "dense Allreduce of n float32 by ring, which is Open MPI's fastest here",
        "all_gather": "TopK: two Allgathers of k indices and k values, 8 bytes each; summed after the clock",
        "gtopk": "gTop-k as published: a tree of merges to rank 0, then a broadcast; 8 bytes an entry",
    },
    "hivemind": {"all_reduce": "one averaging round of n float32, matchmaking included, no compression"},
}
"""The operations of each rival, with a description."""

NAMES = tuple(OPS)

TRAINERS = {"gloo": "gloo", "powersgd": "gloo", "hivemind": "hivemind"}
"""The trainers of `rivals.train`, and the rival in whose environment each runs."""

INTERFACE = "eth0"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a group, whose program has further fields in a subclass.

    Attributes:
        master: host and port of rank 0, such as "10.77.0.2:29500".
        interface: the network interface to the other ranks.
        out: this rank's result file.
    """

    rank: int = 0
    world: int = 1
    master: str = ""
    interface: str = INTERFACE
    out: str = ""

    @property
    def master_host(self) -> str:
        return self.master.rpartition(":")[0]

    @property
    def master_port(self) -> int:
        return int(self.master.rpartition(":")[2])

    def to_text(self) -> str:
        """Return the argument of this rank's program."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argv(cls) -> Self:
        """Return the rank that this process is."""
        return cls(**json.loads(sys.argv[1]))


@dataclass(frozen=True, kw_only=True)
class Request(Rank):
    """A rank that measures an operation.

    Attributes:
        op: one of the rival's `OPS`.
        n: elements of the float32 vector; sparse operations send k = max(1, round(density * n)) of them.
        warmup: repeats before the measured ones.
    """

    op: str
    n: int
    density: float = 0.001
    repeats: int = 5
    warmup: int = 1

    @property
    def k(self) -> int:
        return max(1, round(self.density * self.n))


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement of one rank, or of a group (`combine`).

    Attributes:
        rival, version: for example "gloo", "torch 2.13.0".
        seconds: of each repeat, from the end of a barrier to the end of the operation on this rank.
        cpu_s: CPU time of this rank's processes in each repeat, including helpers (daemons).
        bytes_sent: of this rank's interface in each repeat, including headers; empty if ranks share it.
        payload_bytes: the input of the operation on this rank.
        note: a remark for readers of the table.
    """

    rival: str
    version: str
    op: str
    n: int
    world: int
    rank: int
    seconds: list[float]
    cpu_s: list[float]
    bytes_sent: list[float]
    payload_bytes: int
    note: str = ""

    def write(self, out: str) -> None:
        record.replace(Path(out), json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, out: str) -> Result:
        return cls(**json.loads(Path(out).read_text()))


def combine(results: Sequence[Result]) -> Result:
    """Return the seconds of the slowest rank of each repeat, and all ranks' mean CPU time and bytes."""
    first = results[0]
    sent = [r.bytes_sent for r in results]
    return replace(
        first,
        seconds=[max(column) for column in zip(*(r.seconds for r in results), strict=True)],
        cpu_s=[sum(column) / first.world for column in zip(*(r.cpu_s for r in results), strict=True)],
        bytes_sent=[sum(column) / first.world for column in zip(*sent, strict=True)] if all(sent) else [],
    )


def leave() -> NoReturn:
    """End this process with exit code 0, without ending the interpreter.

    Threads of gloo that still have tensors abort the process at the interpreter's end (pytorch issue 190489),
    others of torch do so rarely; those of hivemind wait for each other there.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
