"""The corpus: inputs in the repository, corpus/<target>/<name>.

A file is named after its content (12 digits of a digest).  An input that showed a fault, now fixed, is
`regression-<words>-<digest>`, and is never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from gridfuzz.reach import Reach, Step
from gridfuzz.targets.base import Target
from gridfuzz.trial import Trial

HERE = Path(__file__).resolve().parents[1]
CORPUS, FINDINGS = HERE / "corpus", HERE / "findings"
MAX_TARGET_BYTES = 18_000
REGRESSION = "regression-"


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()


def load(name: str) -> dict[str, bytes]:
    folder = CORPUS / name
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def store(name: str, inputs: Iterable[bytes], words: str = "") -> list[Path]:
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for data in inputs:
        path = folder / (f"{REGRESSION}{words}-{digest(data)}" if words else digest(data))
        path.write_bytes(data)
        written.append(path)
    return written


def minimised(target: Target, inputs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Regressions, and a greedy selection of the others that reaches the same with few bytes."""
    reach, trial = Reach(target.watched), Trial(target)
    steps: dict[str, set[Step]] = {
        name: reach.trace(lambda data=data: trial.one(data))  # type: ignore[misc]
        for name, data in inputs.items()
    }
    chosen = {name: data for name, data in inputs.items() if name.startswith(REGRESSION)}
    reached: set[Step] = set().union(*(steps[name] for name in chosen))
    left = {name: data for name, data in inputs.items() if name not in chosen}
    while left:
        name = max(left, key=lambda n: (len(steps[n] - reached) / (40 + len(left[n])), n))
        data = left.pop(name)
        if not steps[name] - reached:
            break
        if sum(map(len, chosen.values())) + len(data) > MAX_TARGET_BYTES:
            continue
        chosen[name] = data
        reached |= steps[name]
    return chosen


def replace(name: str, inputs: Mapping[str, bytes]) -> None:
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in inputs:
            path.unlink()
    for file, data in inputs.items():
        (folder / file).write_bytes(data)
