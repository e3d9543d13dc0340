"""Runs tests in forks of one process that has imported and collected everything, one fork for each mutant."""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import hypothesis
import pytest
from mutators import Mutant, mutated_tree

ARGUMENTS = ["-q", "-s", "-m", "not integration and not gpu", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
LIMIT_S = 10.0
"""CPU time of a test with a mutant: so much and `LIMIT_FACTOR` times what it took without."""
LIMIT_FACTOR = 10
IMPORT_LIMIT_S = 120.0
FAR = 8
REPORT = os.fdopen(os.dup(1), "w")


@dataclass(frozen=True, slots=True)
class Recording:
    """What each test took and executed. `lines`: file, line, tests; import time stands as the test ""."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, frozenset[str]]]

    def of(self, mutant: Mutant) -> tuple[list[str], bool]:
        """The tests that execute the mutant, the quickest first; whether importing the module does.

        What is imported can act anywhere: then all tests run, and those that execute nothing of the file come
        as if they took `FAR` times as long.
        """
        lines = self.lines.get(mutant.file, {})
        tests = {test for line in range(mutant.line, mutant.end_line + 1) for test in lines.get(line, ())}
        if not ("" in tests or not mutant.function or "super()" in mutant.before):
            return self._quickest_first(tests, tests), False
        near = {test for those in lines.values() for test in those}
        return self._quickest_first(self.seconds.keys(), near), True

    def _quickest_first(self, tests: Set[str], near: Set[str]) -> list[str]:
        known = tests & self.seconds.keys()
        return sorted(known, key=lambda test: (self.seconds[test] * (1 if test in near else FAR), test))


@dataclass(frozen=True, slots=True)
class Trial:
    mutant: Mutant
    tests: Sequence[str]
    is_imported: bool


class Recorder:
    """pytest plugin: coverage with a context for each test."""

    def __init__(self, folders: Sequence[Path], data_file: Path) -> None:
        include = [f"{folder}/*" for folder in folders]
        os.environ["COVERAGE_CORE"] = "ctrace"
        self.coverage = coverage.Coverage(data_file=str(data_file), include=include, config_file=False)
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        self.seconds[item.nodeid] = 0.0
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.seconds.pop(report.nodeid, None)
        elif report.nodeid in self.seconds:
            self.seconds[report.nodeid] += report.duration

    def finish(self, root: Path) -> dict[str, Any]:
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            lines[str(Path(file).relative_to(root))] = data.contexts_by_lineno(file)
        return {"seconds": self.seconds, "lines": lines}


def record(root: Path, folders: Sequence[Path], tests: Sequence[str], scratch: Path) -> Recording:
    """Runs the tests once; those that fail or are skipped are left out."""
    result = scratch / "recording.json"

    def child() -> None:
        recorder = Recorder(folders, scratch / "coverage.sqlite")
        recorder.coverage.start()
        pytest.main([*ARGUMENTS, *tests], plugins=[recorder, Quick()])
        result.write_text(json.dumps(recorder.finish(root)))

    os.waitpid(_fork(child, scratch / "recording.log"), 0)
    read = json.loads(result.read_text())
    lines = {
        file: {int(line): frozenset(names) for line, names in those.items()}
        for file, those in read["lines"].items()
    }
    return Recording(read["seconds"], lines)


class Quick:
    """pytest plugin: hypothesis looks for a failure and does not simplify it."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        parent = hypothesis.settings.get_profile("gridtrain")
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutation", parent=parent, database=None, phases=phases)
        hypothesis.settings.load_profile("mutation")


class Trials(Quick):
    """pytest plugin: after the collection, instead of running the tests, tries the mutants."""

    def __init__(
        self, root: Path, trials: Sequence[Trial], recording: Recording, jobs: int, out: Path
    ) -> None:
        self.root, self.trials, self.recording, self.jobs, self.out = root, trials, recording, jobs, out
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self.running: dict[int, tuple[Trial, float]] = {}
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed and self.trials[0].is_imported:
            set_outcome(self.out, self.trials[0].mutant, "import")
            return True
        items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # get_objects lists nothing that is frozen, as conftest.py leaves what is collected
        for function in [each for each in gc.get_objects() if isinstance(each, FunctionType)]:
            code = function.__code__
            key = (code.co_filename, code.co_qualname, code.co_firstlineno)
            self.functions.setdefault(key, []).append(function)
        gc.freeze()
        for trial in self.trials:
            while len(self.running) >= self.jobs:
                self._wait()
            pid = _fork(lambda trial=trial: self._try(trial, items))
            self.running[pid] = (trial, time.monotonic())
        while self.running:
            self._wait()
        return True

    def _try(self, trial: Trial, items: Mapping[str, pytest.Item]) -> None:
        """In a fork: runs the tests until one fails."""
        os.setpgid(0, 0)
        if not trial.is_imported:
            self._put_in_place(trial.mutant)
        for test in [test for test in trial.tests if test in items]:  # a mutant may change parameters
            limit_s = LIMIT_S + LIMIT_FACTOR * self.recording.seconds[test]
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends the process
            item = items[test]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        signal.setitimer(signal.ITIMER_PROF, 0)
        set_outcome(self.out, trial.mutant, self.failed or "survived")

    def _put_in_place(self, mutant: Mutant) -> None:
        path, is_found = str(self.root / mutant.file), False
        for code in _functions_in(compile(mutated_tree(self.root, mutant), path, "exec")):
            for function in self.functions.get((path, code.co_qualname, code.co_firstlineno), ()):
                function.__code__, is_found = code, True
        assert is_found, f"no function of {path} is found, so that no mutant of it would be noticed"

    def _wait(self) -> None:
        pid, status = os.waitpid(-1, 0)
        trial, began_s = self.running.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests may have started
        if os.WIFSIGNALED(status):
            set_outcome(self.out, trial.mutant, "time limit")
        if not trial.is_imported:
            _report(self.out, trial, time.monotonic() - began_s)


def run(
    root: Path, trials: Sequence[Trial], recording: Recording, tests: Sequence[str], jobs: int, out: Path
) -> None:
    """Writes the outcome of each trial to `out`.

    Mutants that act while a module is imported have a process of their own, which imports everything anew.
    The others are put into functions that have been imported.
    """
    in_place = [trial for trial in trials if not trial.is_imported]
    if in_place:
        plugin = Trials(root, in_place, recording, jobs, out)
        os.waitpid(_fork(lambda: pytest.main([*ARGUMENTS, *tests], plugins=[plugin]), out / "trials.log"), 0)
    for trial in trials:
        if trial.is_imported:
            began_s = time.monotonic()
            pid = _fork(lambda trial=trial: _try_import(root, trial, recording, out), out / "trials.log")
            if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
                set_outcome(out, trial.mutant, "time limit")
            _report(out, trial, time.monotonic() - began_s)


def _try_import(root: Path, trial: Trial, recording: Recording, out: Path) -> int:
    signal.setitimer(signal.ITIMER_PROF, IMPORT_LIMIT_S)
    _patch_import(root, trial.mutant)
    files = sorted({test.split("::")[0] for test in trial.tests})
    return pytest.main([*ARGUMENTS, *files], plugins=[Trials(root, [trial], recording, 1, out)])


def _patch_import(root: Path, mutant: Mutant) -> None:
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code
    path = str(root / mutant.file)

    def mutated(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) == path:
            code: CodeType = compile(mutated_tree(root, mutant), path, "exec")
            return code
        return get_code(self, fullname)

    loader.get_code = mutated  # type: ignore[method-assign]


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    """Functions and methods, without those within functions."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED:
                yield each
            else:
                yield from _functions_in(each)


def _result_path(out: Path, mutant: Mutant) -> Path:
    return out / f"{mutant.file.replace('/', '.')}-{mutant.number}.txt"


def _report(out: Path, trial: Trial, seconds: float) -> None:
    where = f"{trial.mutant.file}:{trial.mutant.line}"
    print(f"{seconds:6.1f} s  {where}  {outcome_of(out, trial.mutant)}", flush=True, file=REPORT)


def outcome_of(out: Path, mutant: Mutant) -> str:
    """The test that failed, or "time limit", "import", "survived"; "" without a result."""
    path = _result_path(out, mutant)
    return path.read_text() if path.exists() else ""


def set_outcome(out: Path, mutant: Mutant, outcome: str) -> None:
    _result_path(out, mutant).write_text(outcome)


def _fork(run: Callable[[], int | None], log: Path | None = None) -> int:
    """Runs it in a forked process, whose output goes to `log`."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
        code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
