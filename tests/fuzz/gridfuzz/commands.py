"""`make fuzz`: runs targets in turn or on several cores, and prints figures and findings.

    make fuzz MINUTES=5                        all targets, five minutes in all
    make fuzz MINUTES=1 TARGET=codec SEED=7    one of them; the same seed gives the same inputs
    python tests/fuzz --replay FILE            one input, its traceback
    python tests/fuzz --grow --minutes 5       fuzz, and add inputs that reach new lines to the corpus
    python tests/fuzz --minimise               drop inputs from the corpus that reach no additional lines

Exits with 0, or with 1 for findings, whose inputs are then in tests/fuzz/findings/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import SystemRandom
from typing import Any

from gridfuzz import corpus, guided, registry, worker
from gridfuzz.trial import Finding, Trial, interrupted, minimised
from gridfuzz.worker import Job

SHOWN = 8
"""Number of findings whose traceback is printed; the others are written beside their inputs."""

ROOT = corpus.HERE.parents[1]


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in worker.KINDS:
        return worker.main(*arguments)
    options = _parser().parse_args(arguments)
    names = options.target.split(",") if options.target else list(registry.NAMES)
    if unknown := [name for name in names if name not in registry.NAMES]:
        print(f"no target {', '.join(unknown)}; there are {', '.join(registry.NAMES)}")
        return 2
    if options.replay:
        return replay(options.replay, options.target)
    if options.minimise:
        return _minimise(names)
    return _fuzz(options, names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tests/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="in all, over all targets")
    parser.add_argument("--inputs", type=int, help="of each target, instead of a time")
    parser.add_argument("--target", default="", help="some, with commas between them")
    parser.add_argument("--seed", type=int, help="repeats the same inputs; otherwise drawn")
    parser.add_argument("--fuzzer", choices=("auto", "atheris", "own"), default="auto")
    parser.add_argument("--jobs", type=int, default=0, help="processes; else one for each core")
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--minimise", action="store_true")
    parser.add_argument("--replay", type=Path, nargs="+", default=[])
    return parser


# -- fuzzing ---------------------------------------------------------------------------------------


def _fuzz(options: argparse.Namespace, names: Sequence[str]) -> int:
    for name in [name for name in names if registry.missing(name)]:
        print(f"{name:<12} left out: there is no {registry.missing(name)}")
    names = [name for name in names if not registry.missing(name)]
    fuzzer = options.fuzzer
    if fuzzer == "auto":
        fuzzer = "atheris" if guided.available() else "own"
    seed = options.seed if options.seed is not None else SystemRandom().randrange(2**31)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    guide = "atheris (libFuzzer)" if fuzzer == "atheris" else "lines reached (atheris is not installed)"
    if fuzzer == "own" and guided.available():
        guide = "lines reached"
    print(f"seed {seed}, {jobs} processes, guided by {guide}")
    print(f"{'target':<12}{'inputs':>10}{'/ s':>8}{'accepted':>10}{'lines reached':>16}{'MiB':>6}  findings")
    seconds = options.minutes * 60 * min(jobs, len(names)) / max(1, len(names))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        todo = [Job(name, seed, seconds, options.inputs, fuzzer, Path(folder) / name) for name in names]
        results = []
        for job, result in zip(todo, pool.map(_run, todo), strict=True):
            results.append(result)
            _line(job.name, result)
            if options.grow:
                _child("keep", job)
    found = [finding for result in results for finding in result["findings"]]
    inputs = sum(result["inputs"] for result in results)
    print(f"{'all':<12}{inputs:>10,} inputs in {time.monotonic() - began_s:.0f} s, {len(found)} findings")
    for number, finding in enumerate(found):
        _write(finding, whole=number < SHOWN)
    return 1 if found else 0


def _run(job: Job) -> dict[str, Any]:
    job.folder.mkdir(parents=True, exist_ok=True)
    died = _child("work", job)
    path = job.folder / "result.json"
    if not path.exists():  # the process died from the current input
        data = interrupted(job.folder / "current") if (job.folder / "current").exists() else b""
        fatal = Finding(job.name, "the process died", data, died)
        return {"inputs": 0, "accepted": 0, "seconds": 1.0, "peak_mib": 0, "findings": [fatal]}
    measured = _child("measure", job)
    result: dict[str, Any] = json.loads(path.read_text())
    result["findings"] = [
        Finding(job.name, f["signature"], bytes.fromhex(f["data"]), f["text"]) for f in result["findings"]
    ]
    if "lines" not in result:
        result["findings"].append(Finding(job.name, "its inputs cannot be run again", b"", measured))
    return result


def _child(kind: str, job: Job) -> str:
    """Run a child process to its end; return the end of its output."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(corpus.HERE), kind, job.argument()]
    limit_s = 300 + 4 * job.seconds if job.inputs is None else None
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:.0f} s"
    return f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"


def _line(name: str, result: dict[str, Any]) -> None:
    inputs, per_s = result["inputs"], result["inputs"] / max(result["seconds"], 1e-3)
    accepted = f"{100 * result['accepted'] / max(inputs, 1):.0f} %"
    lines = f"{result.get('lines', 0)} of {result.get('lines_in_all', 0)}"
    row = f"{name:<12}{inputs:>10,}{per_s:>8,.0f}{accepted:>10}{lines:>16}{result['peak_mib']:>6}"
    print(f"{row}  {len(result['findings'])}", flush=True)


def _write(finding: Finding, whole: bool) -> None:
    corpus.FINDINGS.mkdir(exist_ok=True)
    if finding.signature not in ("the process died", "its inputs cannot be run again"):
        finding = minimised(registry.find(finding.target), finding)
    path = corpus.FINDINGS / f"{finding.target}-{corpus.digest(finding.data)}"
    path.write_bytes(finding.data)
    path.with_suffix(".txt").write_text(f"{finding.signature}\n{finding.text}")
    shown = path.relative_to(ROOT)
    print(f"\nFOUND by {finding.target}: {finding.signature}, {len(finding.data)} bytes")
    if whole:
        print(finding.text.strip())
    print(f"  again:  .venv/bin/python tests/fuzz --replay {shown}")


# -- one input, and the corpus ---------------------------------------------------------------------


def replay(paths: Sequence[Path], name: str = "") -> int:
    worst = 0
    for path in paths:
        target = registry.find(name or _target_of(path))
        trial = Trial(target, measured_every=1)
        finding = trial.one(path.read_bytes())
        if finding is None:
            print(f"{path.name}: {target.name} {'accepts' if trial.accepted else 'refuses'} it")
        else:
            print(f"{path.name}: {finding.signature}\n{finding.text}")
            worst = 1
    return worst


def _target_of(path: Path) -> str:
    """The target of findings/<target>-<digest> or corpus/<target>/<digest>."""
    parent = path.resolve().parent.name
    return parent if parent in registry.NAMES else path.name.partition("-")[0]


def _minimise(names: Sequence[str]) -> int:
    for name in [name for name in names if not registry.missing(name)]:
        before = corpus.load(name)
        after = corpus.minimised(registry.find(name), before)
        corpus.replace(name, after)
        print(f"{name:<12} {len(before)} inputs -> {len(after)}, {sum(map(len, after.values()))} bytes")
    return 0
