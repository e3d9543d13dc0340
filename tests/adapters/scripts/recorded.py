"""Runs a template's script, and prints what tests/integration/scripts/train.py prints: attempts and the end.

The second argument is "", or a FIFO: a byte lets the worker begin a step, from `GATED_FROM` on.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import gridtrain
from gridtrain.sdk.batches import Turns
from gridtrain.training.checkpoint import serialization
from gridtrain.training.data.sampler import sample_indices

GATED_FROM = 2
path = Path(__file__).parents[2] / "integration" / "scripts" / "train.py"
spec = importlib.util.spec_from_file_location("script_of_processes", path)
script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

_wrap, _each_call = gridtrain.Grid.optimizer, Turns.__iter__
made = {}


def wrap(grid, optimizer, model, **options):
    optimizer = _wrap(grid, optimizer, model, **options)
    made.update(grid=grid, model=model, optimizer=optimizer)
    made["recorder"] = script.AttemptRecorder(grid, optimizer, script.Options())
    return optimizer


def each_call(turns):
    """With `LocalSteps` a turn has several calls of `step`, and an attempt the samples of the whole turn."""
    recorder, grid, step = made["recorder"], made["grid"], -1
    for spans in _each_call(turns):
        if grid.step != step:
            step, recorder.batch = grid.step, []
            if sys.argv[2] and step >= GATED_FROM:
                with grid.evaluation():
                    script.wait_for_gate(sys.argv[2])
        # A call without samples gets those of another one, so that its gradient can be ignored.
        recorder.batch = sorted({*recorder.batch, *sample_indices(turns.spec, spans)})
        yield spans


gridtrain.Grid.optimizer, Turns.__iter__ = wrap, each_call
script.say("loaded", pid=os.getpid())
runpy.run_path(sys.argv[1], run_name="__main__")
optimizer = made["optimizer"]
script.say(
    "end",
    step=made["grid"].step,
    digest=serialization.replica_digest(made["model"], optimizer.replicated).hex(),
    parameters=script.digest_of(made["model"].parameters()),  # with the base
    trackers={name: repr(tracker.state_dict()) for name, tracker in optimizer.trackers.items()},
    consumed=made["recorder"]._session.snapshot.ledger.consumed,
)
