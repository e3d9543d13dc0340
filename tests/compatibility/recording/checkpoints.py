"""Records checkpoints as workers write them, and beside them what the model was at that step.

Written for commit 330f465; never adapted to a later one.  The workers are threads of this process.  What the
model was is taken from the training loop, not read back from the disk.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gridtrain.runtime.local import LocalGroup

EVERY, UNTIL, STEPS = 3, 5, 12
WORKERS = 2
KEPT = {"gtopk": ("worker-0", "worker-1")}
WITHIN_S = 60.0
SCRIPTS = Path(__file__).parent.parent / "data" / "scripts"

Write = Callable[[Path, Any], None]


def record(out: Path, write: Write) -> None:
    torch.set_num_threads(1)
    training = script("train")
    for variant in training.VARIANTS:
        known: dict[str, Any] = {}

        def work(grid: Any, number: int, variant: str = variant, known: dict[str, Any] = known) -> None:
            def look(step: int, model: Any, optimizer: Any) -> None:
                if step == EVERY and f"worker-{number}" not in known:
                    known[f"worker-{number}"] = {
                        "model": described(model.state_dict()),
                        "residual": described(optimizer.residual_state()),
                        "lr": [group["lr"] for group in optimizer.param_groups],
                    }
                grid._checkpoints.wait()

            training.train(grid, variant, STEPS, look=look, until=UNTIL)

        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), work)
            names = KEPT.get(variant, ("worker-0",))
            keep(Path(folder), out / "checkpoints" / variant, names, "left")
        write(out / "checkpoints" / variant / "known.json", {name: known[name] for name in names})
    record_stages(out, write)


def record_stages(out: Path, write: Write) -> None:
    """Each worker ends up with its own stage's checkpoint and a copy of the other one's."""
    staged = script("pipeline")
    known: dict[str, Any] = {}

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)

        def work(grid: Any, number: int) -> None:
            def look(step: int, pipe: Any) -> None:
                if step == EVERY and f"worker-{number}" not in known:
                    known[f"worker-{number}"] = {
                        "stage": pipe.stage,
                        "model": described(pipe.module.state_dict()),
                        "residual": described(pipe.residual_state()),
                    }
                until_s = time.monotonic() + WITHIN_S
                while step > EVERY and len(list(base.glob(f"*/blocks-*/step-{EVERY:08d}"))) < 4:
                    assert time.monotonic() < until_s, "the copies did not arrive"
                    time.sleep(0.05)

            pipe = staged.train(grid, STEPS, look=look, until=UNTIL)
            known[f"worker-{number}"]["residual at the end"] = described(pipe.residual_state())

        run(base, work)
        keep(base, out / "checkpoints" / "stages", ("worker-0", "worker-1"))
    write(out / "checkpoints" / "stages" / "known.json", {name: known[name] for name in sorted(known)})


def script(name: str) -> ModuleType:
    """One of the recorded training scripts as a module."""
    spec = importlib.util.spec_from_file_location(f"recorded_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, work: Callable[[Any, int], None]) -> None:
    """All workers to the end of `work`."""
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            state = folder / f"worker-{number}"
            with group.join(
                f"worker-{number}", checkpoint_every=EVERY, state_dir=str(state), export_dir=str(folder)
            ) as grid:
                work(grid, number)
        except BaseException as error:
            failed.append(error)

    with LocalGroup(min_workers=WORKERS) as group:
        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
    if failed:
        raise failed[0]


def keep(folder: Path, out: Path, names: Sequence[str], *without: str) -> None:
    """Some workers' folders, without what only marks them as used."""
    shutil.rmtree(out, ignore_errors=True)
    for name in names:
        shutil.copytree(folder / name, out / name, ignore=shutil.ignore_patterns("lock", *without))


def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Name -> [dtype, shape, bytes in hexadecimal, least significant first]."""
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex(),
        ]
        for name, tensor in tensors.items()
    }
