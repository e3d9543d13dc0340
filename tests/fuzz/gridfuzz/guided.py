"""Fuzzing with atheris (libFuzzer): the same targets and mutators, guided by edges and comparisons.

The product must be imported with atheris' instrumentation, so this module imports it first, in a separate
process, which libFuzzer ends.
"""

from __future__ import annotations

import importlib.util
import io
import os
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing them would import the product
    from gridfuzz.targets.base import Target
    from gridfuzz.trial import Trial


def available() -> bool:
    return importlib.util.find_spec("atheris") is not None


def find(name: str) -> Target:
    """The target, with the product imported under atheris' instrumentation."""
    import atheris

    with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["gridtrain"]):
        from gridfuzz import registry

        return registry.find(name)


def fuzz(
    trial: Trial, folders: list[Path], seed: int, over: Callable[[], bool], end: Callable[[], None]
) -> None:
    """Fuzz until `over`, then call `end`; does not return.  New inputs are in folders[0]."""
    import atheris

    from gridfuzz.mutate import damage

    target = trial.target
    pool = [path.read_bytes() for folder in folders for path in sorted(folder.iterdir())]

    def one(data: bytes) -> None:
        trial.one(data)
        if over():
            end()
            os._exit(0)  # libFuzzer would do the same, without `end`

    def change(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        most = min(most, target.max_bytes)
        if random.random() < 0.15:
            data = target.valid(random)
        if target.change is not None and random.random() < 0.5:
            return target.change(data, random)[:most]
        if random.random() < 0.6:
            out: bytes = atheris.Mutate(data[:most], most)
            return out
        return damage(data, random, target.tokens, pool, most)

    arguments = [
        "fuzz",
        *map(str, folders),
        f"-seed={seed % 2**31 or 1}",
        f"-max_len={target.max_bytes}",
        "-timeout=86400",  # `Trial` limits CPU time; libFuzzer limits wall-clock time
        f"-artifact_prefix={folders[0].parent}/",
        "-rss_limit_mb=0",
        "-verbosity=0",
        "-detect_leaks=0",
    ]
    try:
        atheris.Setup(arguments, one, custom_mutator=change)
        atheris.Fuzz()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # a regular exit of an interpreter with atheris may hang for ever
