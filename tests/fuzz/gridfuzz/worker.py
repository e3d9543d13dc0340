"""One target in one process, until its time or its inputs are used up.

worker   fuzzes; writes `result.json`, and inputs that reached new lines to pool/
keep     adds inputs to the corpus that reach more than the corpus
measure  traces pool/ and the corpus in the same way for both fuzzers: the lines reached
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 8 << 30
"""Limit of memory: an input that allocates too much raises MemoryError, which is a finding."""


@dataclass(frozen=True)
class Job:
    """`inputs` None: limited by time.  `folder`: for the results of the job."""

    name: str
    seed: int
    seconds: float
    inputs: int | None
    fuzzer: str
    folder: Path

    def argument(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def parse(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "folder": Path(fields["folder"])})


def work(job: Job) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    if job.fuzzer == "atheris":
        from gridfuzz import guided

        target = guided.find(job.name)
    else:
        from gridfuzz import registry

        target = registry.find(job.name)
    from gridfuzz import corpus
    from gridfuzz.trial import Trial

    pool = job.folder / "pool"
    pool.mkdir(parents=True, exist_ok=True)
    trial = Trial(target, job.folder / "current")
    began_s = time.monotonic()

    def over() -> bool:
        if job.inputs is not None:
            return trial.inputs >= job.inputs
        return trial.inputs % 16 == 0 and time.monotonic() - began_s >= job.seconds

    def end() -> None:
        result = {
            "inputs": trial.inputs,
            "accepted": trial.accepted,
            "seconds": time.monotonic() - began_s,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "findings": [
                {"signature": f.signature, "text": f.text, "data": f.data.hex()}
                for f in trial.findings.values()
            ],
        }
        (job.folder / "result.json").write_text(json.dumps(result))

    stored = corpus.load(job.name)
    if job.fuzzer == "atheris":
        seeds = job.folder / "seeds"
        _seed(seeds, target, job.seed, stored)
        guided.fuzz(trial, [pool, seeds], job.seed, over, end)
    else:
        from gridfuzz import own
        from gridfuzz.reach import Reach

        for data in own.fuzz(trial, Reach(target.watched), list(stored.values()), job.seed, over):
            (pool / corpus.digest(data)).write_bytes(data)
        end()
    return 0


def _seed(folder: Path, target: Any, seed: int, stored: dict[str, bytes]) -> None:
    from random import Random

    from gridfuzz.own import FRESH

    folder.mkdir(parents=True, exist_ok=True)
    random = Random(f"{seed} {target.name}")
    for number, data in enumerate([*stored.values(), *(target.valid(random) for _ in range(FRESH))]):
        (folder / f"{number:04}").write_bytes(data)


def grown(job: Job) -> list[Path]:
    """The initial inputs and those that the job added; libFuzzer does not copy the former."""
    folders = [job.folder / "pool", job.folder / "seeds"]
    return [path for folder in folders if folder.is_dir() for path in folder.iterdir()]


def measure(job: Job) -> int:
    """Adds the lines reached to `result.json`."""
    from gridfuzz import corpus, registry
    from gridfuzz.reach import Reach
    from gridfuzz.trial import Trial

    target = registry.find(job.name)
    reach, trial = Reach(target.watched), Trial(target)
    inputs = corpus.load(job.name)
    for path in sorted(grown(job)):
        inputs.setdefault(path.name, path.read_bytes())
    for data in inputs.values():
        reach.add(reach.trace(lambda data=data: trial.one(data)))  # type: ignore[misc]
    path = job.folder / "result.json"
    result = json.loads(path.read_text())
    result |= {"lines": reach.lines, "lines_in_all": reach.lines_in_all}
    path.write_text(json.dumps(result))
    return 0


def keep(job: Job) -> int:
    """Add inputs to the corpus that reach more than the corpus."""
    from gridfuzz import corpus, registry
    from gridfuzz.trial import Trial

    target = registry.find(job.name)
    inputs, trial = corpus.load(job.name), Trial(target)
    for path in sorted(grown(job)):
        data = path.read_bytes()
        if trial.one(data) is None:
            inputs.setdefault(corpus.digest(data), data)
    corpus.replace(job.name, corpus.minimised(target, inputs))
    return 0


KINDS = {"work": work, "measure": measure, "keep": keep}


def main(kind: str, text: str) -> int:
    job = Job.parse(text)
    if os.environ.get("PYTHONHASHSEED") != "0":
        sys.exit("a worker needs PYTHONHASHSEED=0, because inputs of a seed depend on the order of sets")
    return KINDS[kind](job)
