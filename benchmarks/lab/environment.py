"""The environment variables of the processes of the lab, of `chaos` and of `hostile`."""

from __future__ import annotations

import os
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
TESTS = BENCHMARKS.parent / "tests"


def environment(state: Path, **more: str) -> dict[str, str]:
    """Return this process's variables without gridtrain's settings, with paths, the state folder and `more`.

    Scripts use one thread, because the workers share the cores, and can import the modules of benchmarks/.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")}
    path = os.pathsep.join(
        filter(None, (str(BENCHMARKS), str(TESTS / "common"), str(TESTS), inherited.get("PYTHONPATH", "")))
    )
    one = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    return {**inherited, **one, "XDG_STATE_HOME": str(state), **more}
