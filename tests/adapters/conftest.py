"""Groups of real processes, as in tests/integration, that run the examples.

with new_group(min_workers=2) as group:
    group.start("anna", sys.executable, "script.py")    gridtrain worker INVITATION -- python script.py
trained("hf_trainer.py", workers=2, steps=30)           what each worker's model and samples were
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from thread_groups import brisk_groups  # noqa: F401

_HERE = Path(__file__).parent
EXAMPLES = _HERE.parents[1] / "examples"
RUN = _HERE / "scripts" / "run_example.py"
MORE_S = 120.0  # these programs import much


def _groups() -> Any:
    """tests/integration is no package: what it has is loaded from the file."""
    path = _HERE.parent / "integration" / "conftest.py"
    spec = importlib.util.spec_from_file_location("groups_of_processes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_of_processes = _groups()


class Group(_of_processes.Group):  # type: ignore[misc,name-defined]
    def start(self, name: str, *command: str) -> None:
        """A worker that runs `command`."""
        agent = ("worker", self.invitation(), "--name", name, "--export-dir", str(self.folder))
        argv = (*_of_processes.CLI, *agent, "--", *command)
        self.workers[name] = _of_processes.Program(name, argv, self._changed, state=self.folder)


@pytest.fixture
def new_group(tmp_path: Path) -> Callable[..., Group]:
    return partial(Group, tmp_path, more_s=MORE_S)


@pytest.fixture
def trained(new_group: Callable[..., Group]) -> Callable[..., list[dict[str, Any]]]:
    def run(example: str, *, workers: int, steps: int) -> list[dict[str, Any]]:
        with new_group(min_workers=workers) as group:
            for number in range(workers):
                group.start(f"worker-{number}", sys.executable, str(RUN), str(EXAMPLES / example), str(steps))
            ends = group.finish()
        assert len(ends) == workers
        return ends

    return run
