"""A short run of `make fuzz` over the corpus and new inputs; and a check that it finds planted faults.

make fuzz MINUTES=10 SEED=1        a longer run
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gridfuzz import commands, corpus, guided, own, registry, trial
from gridfuzz.reach import Reach
from gridfuzz.targets.base import Target
from gridfuzz.trial import Finding, Trial

from gridtrain.errors import RemoteProtocolError

SEED = 2026
SLOW = ("state", "member", "membership", "door", "sealed")  # some milliseconds for each input

TARGETS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            bool(registry.missing(name)), reason=f"there is no {registry.missing(name)}"
        ),
    )
    for name in registry.NAMES
]


def short_run(name: str, inputs: int, seed: int = SEED) -> tuple[Trial, list[bytes]]:
    target = registry.find(name)
    tried = Trial(target)
    stored = list(corpus.load(name).values())
    pool = own.fuzz(tried, Reach(target.watched), stored, seed, lambda: tried.inputs >= inputs)
    return tried, pool


def text_of(tried: Trial) -> str:
    return "\n".join(f"{f.signature} ({f.data.hex()})\n{f.text}" for f in tried.findings.values())


# -- the product ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_the_corpus_have_no_findings(name: str) -> None:
    stored = corpus.load(name)
    assert stored, f"corpus/{name} is empty: python tests/fuzz --grow --target {name}"
    tried = Trial(registry.find(name), measured_every=1)
    found = {file: finding.text for file, data in stored.items() if (finding := tried.one(data)) is not None}
    assert not found, "\n".join(f"--replay tests/fuzz/corpus/{name}/{file}\n{t}" for file, t in found.items())


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs_have_no_findings(name: str) -> None:
    target, random = registry.find(name), Random(f"{SEED} {name}")
    pool = list(corpus.load(name).values())
    tried = Trial(target)
    for _ in range(60 if name in SLOW else 800):
        tried.one(own.mutated(target, random, pool))
    assert not tried.findings, f"seed {SEED}: {text_of(tried)}"


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted(name: str) -> None:
    """Otherwise the targets would reach only the first check of each decoder."""
    target, random = registry.find(name), Random(f"{SEED} {name}")
    tried = Trial(target)
    for _ in range(30):
        tried.one(target.valid(random))
    assert tried.accepted >= 3, f"{tried.accepted} of 30"


# -- planted faults: a defence is disabled, and the fuzzer finds it ----------------------------------

PLANTED = {
    "codec": ("gridtrain.core.messages.declaration.IntField.pack", lambda self, value: value, 20000),
    "sparse": ("gridtrain.network.wire.value_encoding._EXPONENT_MAX", 400, 4000),
    "slices": ("gridtrain.runtime.buffers.collective_buffers._check_magnitudes", lambda *of: None, 4000),
    "status": ("gridtrain.runtime.client.coordinator_client._printable", lambda value: value, 200),
    "stateblocks": (
        "gridtrain.runtime.state_transfer.blobs.BlobReceiver.is_complete_for",
        lambda self, generation: True,
        200,
    ),
    "state": ("gridtrain.training.checkpoint.serialization._check_same", lambda what, theirs, own: None, 400),
    "collectives": ("gridtrain.core.collectives.collective.check_expected", lambda *of: None, 400),
    "attempts": ("gridtrain.core.commit.attempts._proves_commit", lambda rank: True, 4000),
    "member": ("gridtrain.core.commit.two_phase_commit._decides", lambda *ranks: True, 1500),
    "membership": (
        "gridtrain_coordinator.membership.view_installer.generation_entry",
        lambda view, roster: {},
        100,
    ),
    "door": ("gridtrain_coordinator.access.authorization_limits.is_used_up", lambda used, uses: False, 1000),
    "sealed": ("gridtrain.network.transport.secure_channel.is_replayed", lambda counter, after: False, 600),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", PLANTED)
def test_a_missing_defence_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.missing(name):
        pytest.skip(f"there is no {registry.missing(name)}")
    place, without, inputs = PLANTED[name]
    target = registry.find(name)
    owner, attribute = _owner(place)
    monkeypatch.setattr(owner, attribute, without)
    tried, random, pool = Trial(target), Random(SEED), list(corpus.load(name).values())
    while not tried.findings and tried.inputs < inputs:
        tried.one(own.mutated(target, random, pool))
    assert tried.findings, f"nothing found in {inputs} inputs without {place}"


def _owner(place: str) -> tuple[Any, str]:
    path, _, attribute = place.rpartition(".")
    try:
        return import_module(path), attribute
    except ModuleNotFoundError:
        module, _, cls = path.rpartition(".")
        return getattr(import_module(module), cls), attribute


# -- the tool ---------------------------------------------------------------------------------------


def made_up(run: Callable[[bytes], bool]) -> Target:
    return Target("made-up", "", run, lambda random: b"valid", ("gridfuzz.source",))


def test_a_seed_repeats_its_inputs() -> None:
    seen: dict[int, list[bytes]] = {}

    def inputs_of(seed: int) -> list[bytes]:
        inputs: list[bytes] = []
        base = registry.find("sparse")
        tried = Trial(replace(base, run=lambda data: inputs.append(data) is None and base.run(data)))
        own.fuzz(tried, Reach(base.watched), [], seed, lambda: tried.inputs >= 300)
        return inputs

    for seed in (1, 2):
        seen[seed] = inputs_of(seed)
        assert inputs_of(seed) == seen[seed]
    assert seen[1] != seen[2]


STAIRS = """
def run(data):
    if data[0:1] < b"\\x80":
        return False
    if data[7:8] < b"\\x80":
        return False
    if data[3:4] < b"\\x80":
        return False
    if data[5:6] < b"\\x80":
        return False
    raise AssertionError("the top")
"""


def test_inputs_that_reach_new_lines_are_mutated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four nested conditions: the last is only found if inputs that reach one are mutated."""
    (tmp_path / "stairs.py").write_text(STAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    target = Target(
        "stairs", "", import_module("stairs").run, lambda random: bytes(8), ("stairs",), max_bytes=8
    )

    def inputs_to_the_top(guided: bool) -> int:
        tried, reach = Trial(target), Reach(target.watched)
        if not guided:
            monkeypatch.setattr(reach, "add", lambda steps: False)
        own.fuzz(tried, reach, [], SEED, lambda: bool(tried.findings) or tried.inputs > 30_000)
        return tried.inputs

    guided_by_lines, blind = inputs_to_the_top(guided=True), inputs_to_the_top(guided=False)
    assert guided_by_lines < 10_000 and guided_by_lines < blind


def test_too_much_time_or_memory_and_hangs_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: bytes) -> bool:
        match data:
            case b"slow":
                sum(range(8_000_000))
            case b"large":
                bytearray(1 << 27)[:: 1 << 12] = bytes(1 << 15)  # touched, so that it counts
            case b"hang":
                while True:
                    try:
                        sum(range(1000))
                    except Exception:
                        raise AssertionError("a time-out must not be swallowed") from None
            case b"refused":
                return False
        return True

    tried = Trial(replace(made_up(run), cpu_s=0.02))
    assert tried.one(b"good") is None
    assert tried.one(b"refused") is None
    assert (tried.inputs, tried.accepted) == (2, 1)
    slow, large = tried.one(b"slow"), Trial(replace(made_up(run), cpu_s=5.0), measured_every=1).one(b"large")
    assert slow is not None and slow.signature == "too slow"
    assert large is not None and large.signature == "too much memory", large
    monkeypatch.setattr(trial, "HANG_S", 0.2)
    hang = tried.one(b"hang")
    assert hang is not None and hang.signature.startswith("Hang in ")


def test_a_finding_is_minimised() -> None:
    def run(data: bytes) -> bool:
        if b"\xff\xfe" in data:
            raise RemoteProtocolError("the target refuses every input")
        return True

    target = made_up(run)
    finding = Trial(target).one(Random(1).randbytes(300) + b"\xff\xfe" + bytes(range(1, 200)))
    assert finding is not None
    assert trial.minimised(target, finding).data == b"\xff\xfe"


def test_findings_are_written_with_the_command_that_replays_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "FINDINGS", tmp_path / "findings")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    finding = Finding("sparse", "the process died", b"\1\2", "exit code -11")
    result = {"inputs": 5, "accepted": 1, "seconds": 1.0, "peak_mib": 9, "findings": [finding]}
    monkeypatch.setattr(commands, "_run", lambda job: result)
    assert commands.main(["--target", "sparse", "--seed", "3"]) == 1
    said = capsys.readouterr().out
    assert "seed 3" in said and "FOUND by sparse: the process died" in said
    command = said.strip().splitlines()[-1]
    (written,) = (path for path in (tmp_path / "findings").iterdir() if not path.suffix)
    assert command.endswith(f"--replay findings/{written.name}") and written.read_bytes() == b"\1\2"
    assert commands.main(["--replay", str(written)]) == 0  # it is a valid payload


@pytest.mark.parametrize("fuzzer", ["own", "atheris"])
def test_the_command_of_make_fuzz(fuzzer: str) -> None:
    if fuzzer == "atheris" and not guided.available():
        pytest.skip("atheris is not installed: pip install atheris")
    command = [sys.executable, str(corpus.HERE), "--target", "merge", "--inputs", "300", "--seed", "1"]
    done = subprocess.run(
        [*command, "--fuzzer", fuzzer, "--jobs", "1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, line, last = done.stdout.splitlines()
    guide = "atheris (libFuzzer)" if fuzzer == "atheris" else "lines reached"
    assert first == f"seed 1, 1 processes, guided by {guide}" or "atheris is not installed" in first
    assert line.split()[:2] == ["merge", "300"] and int(line.split()[5]) > 50  # lines reached
    assert last.split()[:3] == ["all", "300", "inputs"] and last.endswith("0 findings")


def test_the_corpus_is_small_and_named_by_content() -> None:
    files = [path for path in corpus.CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert [path for path in files if not path.name.endswith(corpus.digest(path.read_bytes()))] == []
    assert {path.parent.name for path in files} <= set(registry.NAMES)
