"""The interface of a rival: a command line, and a JSON file of each rank.

It needs only the standard library, because each rival's own interpreter runs it, without gridtrain.

    harness --argv--> python -m rivals.NAME --rank R --world P --master HOST:PORT --interface eth0
                            --op OP --n N --density RHO --repeats 5 --warmup 1 --out FILE    (for each rank)
    harness <--FILE-- {"rival", "version", "op", "n", "world", "rank", "seconds": [...], "cpu_s": [...], ...}

All ranks of a group get the same command line except `--rank` and `--out`; rank 0 runs on the host of
`--master`, where the group uses the ports PORT and PORT + 1.  A rank that exits with 0 has written its file;
a group's time of a repeat is the longest of its ranks (`combine`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

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


class ContractError(Exception):
    """A file or a request violates the contract; the text says how."""


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's part of a measurement; the fields are the options of `python -m rivals.NAME`.

    Attributes:
        op: one of the rival's `OPS`.
        n: elements of the float32 vector; sparse operations send k = max(1, round(density * n)) of them.
        master: host and port of rank 0, such as "10.77.0.2:29500".
        interface: the network interface to the other ranks.
        warmup: repeats before the measured ones.
        out: this rank's result file.
    """

    rank: int
    world: int
    master: str
    op: str
    n: int
    out: Path
    density: float = 0.001
    repeats: int = 5
    warmup: int = 1
    interface: str = INTERFACE

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ContractError(f"rank is {self.rank}; it must be at least 0 and below --world {self.world}")
        if self.n < 1 or self.repeats < 1 or self.warmup < 0:
            text = f"n is {self.n}, repeats {self.repeats}, warmup {self.warmup}"
            raise ContractError(f"{text}; they must be at least 1, 1 and 0")
        if not 0 < self.density <= 1:
            raise ContractError(f"density is {self.density}; it must be above 0 and at most 1")
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65535:
            raise ContractError(
                f"master is {self.master!r}; it must be HOST:PORT, and PORT + 1 must be a port"
            )

    @property
    def k(self) -> int:
        return max(1, round(self.density * self.n))

    @property
    def master_host(self) -> str:
        return self.master.rpartition(":")[0]

    @property
    def master_port(self) -> int:
        return int(self.master.rpartition(":")[2])

    def to_arguments(self) -> list[str]:
        """Return the request as arguments for `parse`."""
        return [
            word for field in fields(self) for word in (f"--{field.name}", str(getattr(self, field.name)))
        ]


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

    def write(self, path: Path) -> None:
        record.replace(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result.  Raises `ContractError` if the file has none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ContractError(f"{path} has no result of a rival: {error}") from None


def combine(results: Sequence[Result]) -> Result:
    """Return the seconds of the slowest rank of each repeat, and the means of the others' CPU time and bytes.

    Raises `ContractError` if a result is missing or of another run.
    """
    if not results:
        raise ContractError("there are no results")
    first = results[0]
    kinds = {(r.rival, r.version, r.op, r.n, r.world, len(r.seconds), len(r.cpu_s)) for r in results}
    if len(kinds) > 1:
        raise ContractError(f"the results are of different runs: {sorted(map(str, kinds))}")
    if sorted(r.rank for r in results) != list(range(first.world)):
        raise ContractError(f"ranks {sorted(r.rank for r in results)} of {first.world} have results")
    sent = [r.bytes_sent for r in results]
    return replace(
        first,
        seconds=[max(column) for column in zip(*(r.seconds for r in results), strict=True)],
        cpu_s=[sum(column) / first.world for column in zip(*(r.cpu_s for r in results), strict=True)],
        bytes_sent=[sum(column) / first.world for column in zip(*sent, strict=True)] if all(sent) else [],
    )


def parse(rival: str, arguments: Sequence[str] | None = None) -> Request:
    """Parse the command line of `python -m rivals.RIVAL`; end the program with code 2 if it is invalid."""
    parser = argparse.ArgumentParser(prog=f"python -m rivals.{rival}", description="one rank of a rival")
    kinds = {"int": int, "float": float, "str": str, "Path": Path}
    for field in fields(Request):
        is_needed = field.default is MISSING
        choices = sorted(OPS[rival]) if field.name == "op" else None
        options = {"required": True} if is_needed else {"default": field.default}
        parser.add_argument(f"--{field.name}", type=kinds[str(field.type)], choices=choices, **options)
    try:
        return Request(**vars(parser.parse_args(arguments)))
    except ContractError as error:
        parser.error(str(error))


def leave() -> NoReturn:
    """End this process with exit code 0, without ending the interpreter.

    Threads of gloo that still have tensors abort the process at the interpreter's end (pytorch issue 190489),
    others of torch do so rarely; those of hivemind wait for each other there.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
