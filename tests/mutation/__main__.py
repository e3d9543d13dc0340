"""`make mutants`: how many small changes of the sources the tests notice (mutation testing).

    python tests/mutation --count 300 --out build/mutants          a sample, the same for the same seed
    python tests/mutation --again --tests tests/runtime tests/sdk  its survivors, against other tests

Each mutant runs the tests that execute it, the quickest first, until one fails or those within the bound have
passed. Outcomes are kept in the folder `--out`. Mutants named in equivalent.toml are set aside: no test can
tell them from the original. Prints survivors and the share killed by package; exits with 1 below `--least`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mutators import Mutant, sample
from trials import Recording, Trial, outcome_of, record, run, set_outcome

PURE = ("run", "stages", "membership", "access")
SOURCES = [
    "gridtrain/core",
    "gridtrain/sparsify",
    *(f"coordinator/gridtrain_coordinator/{folder}" for folder in PURE),
]
TESTS = [
    "tests/core",
    "tests/sparsify",
    *(f"tests/coordinator/{folder}" for folder in PURE),
    "tests/simulation",
]
LEFT_OUT = {"cuda_selection.py", "triton_kernels.py"}
"""They need a GPU."""

SURVIVED = ("survived", "not executed")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    root, out = Path.cwd().resolve(), options.out.resolve()
    if not options.again:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        chosen = sample(root, _files(root, options.sources), options.count, options.seed)
        (out / "sample.json").write_text(json.dumps([asdict(mutant) for mutant in chosen], indent=1))
    chosen = [Mutant(**each) for each in json.loads((out / "sample.json").read_text())]
    equivalent = _equivalent(options.equivalent)
    todo = [mutant for mutant in chosen if outcome_of(out, mutant) in ("", *SURVIVED)]
    if options.again:
        todo = [mutant for mutant in todo if mutant.key() not in equivalent]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        recording = record(root, [root / source for source in options.sources], options.tests, Path(folder))
        print(f"{len(todo)} mutants, {len(recording.seconds)} tests", flush=True)
        trials = []
        for mutant in todo:
            tests, is_imported = recording.of(mutant)
            tests = _within(tests, recording, options.bound)
            if tests:
                trials.append(Trial(mutant, tests, is_imported))
            elif not outcome_of(out, mutant):
                set_outcome(out, mutant, "not executed")
        run(root, trials, recording, options.tests, options.jobs, out)
    return 0 if _print_results(chosen, out, equivalent) >= options.least else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests/mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--sources", nargs="+", default=SOURCES, help="folders whose modules are changed")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--count", type=int, default=300, help="mutants")
    parser.add_argument("--seed", type=int, default=1, help="another sample")
    parser.add_argument("--bound", type=float, default=60.0, help="seconds of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--again", action="store_true", help="only the survivors of the last run")
    parser.add_argument("--least", type=float, default=90.0, help="per cent that must be killed")
    parser.add_argument("--out", type=Path, default=Path("build/mutants"))
    parser.add_argument("--equivalent", type=Path, default=Path(__file__).with_name("equivalent.toml"))
    return parser.parse_args(arguments)


def _files(root: Path, sources: Sequence[str]) -> list[str]:
    found = sorted(path for source in sources for path in (root / source).rglob("*.py"))
    return [str(path.relative_to(root)) for path in found if path.name not in LEFT_OUT]


def _equivalent(path: Path) -> dict[tuple[str, str, str, str], str]:
    """Reasons, by `Mutant.key`."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return {
        (each["file"], each["function"], each["before"], each["after"]): each["reason"] for each in entries
    }


def _within(tests: Sequence[str], recording: Recording, bound_s: float) -> list[str]:
    """The quickest that together take at most `bound_s`; at least one."""
    sums = itertools.accumulate(recording.seconds[test] for test in tests)
    return [test for test, sum_s in zip(tests, sums, strict=True) if sum_s <= bound_s] or list(tests[:1])


def _print_results(
    chosen: Sequence[Mutant], out: Path, equivalent: dict[tuple[str, str, str, str], str]
) -> float:
    """Returns the per cent killed."""
    outcomes = {mutant: outcome_of(out, mutant) for mutant in chosen}
    for mutant, outcome in outcomes.items():
        if mutant.key() not in equivalent and outcome in ("", *SURVIVED):
            print(f"\n{outcome or 'no result'}: {mutant.diff()}")
        elif mutant.key() in equivalent and outcome not in SURVIVED:
            print(f"\nnamed equivalent, but killed by {outcome}: {mutant.diff()}")
    print(f"\n{'':44}{'mutants':>8}{'equivalent':>11}{'killed':>8}{'share':>9}   95 % interval")
    summary = {}
    for name in [*sorted({_package(mutant) for mutant in chosen}), "all"]:
        those = [mutant for mutant in chosen if name in ("all", _package(mutant))]
        aside = sum(mutant.key() in equivalent and outcomes[mutant] in SURVIVED for mutant in those)
        killed = sum(outcomes[mutant] not in ("", *SURVIVED) for mutant in those)
        share = 100 * killed / max(len(those) - aside, 1)
        low, high = _interval(killed, len(those) - aside)
        print(f"{name:44}{len(those):8}{aside:11}{killed:8}{share:7.1f} %   {low:.1f} to {high:.1f} %")
        summary[name] = {"mutants": len(those), "equivalent": aside, "killed": killed, "share": share}
        summary[name] |= {"low": low, "high": high}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return share


def _package(mutant: Mutant) -> str:
    return str(Path(mutant.file).parent)


def _interval(killed: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's, in per cent."""
    if not of:
        return 0.0, 100.0
    share, weight = killed / of, z * z / of
    half = z * math.sqrt(share * (1 - share) / of + weight / (4 * of))
    middle, scale = share + weight / 2, 100 / (1 + weight)
    return (middle - half) * scale, (middle + half) * scale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
