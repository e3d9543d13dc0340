"""The variables that real processes of a measured or troubled group are started with.

Decides which of this process's own they inherit.  Used by the lab, the storms and the hostile runs alike.
"""

from __future__ import annotations

import os
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
TESTS = BENCHMARKS.parent / "tests"


def environment(state: Path, **more: str) -> dict[str, str]:
    """Return our variables without the settings of another run, and with one thread for each worker, because
    they share the cores.  Scripts find the modules of this folder's parent."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")}
    path = os.pathsep.join(
        filter(None, (str(BENCHMARKS), str(TESTS / "common"), str(TESTS), inherited.get("PYTHONPATH", "")))
    )
    one = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    return {**inherited, **one, "XDG_STATE_HOME": str(state), **more}
