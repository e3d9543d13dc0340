"""Messages of a worker at the start and end of a run, and the exit code of a refused script."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from torch import nn
from training_loop import sgd

import gridtrain
from gridtrain.core.messages import EndRun, OperatorReply, Refused
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.runtime.client.agent_link import AgentDirective, NoAgent
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.pause import PauseController

DATA = [torch.full((2,), float(i)) for i in range(8)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_workers_stop_early_at_the_same_step_even_if_a_newcomer_joins_during_the_call(
    new_group: Any, accumulate: int
) -> None:
    """Only the first worker wants to stop; its own value alone must decide nothing.  The newcomer receives
    the state from a worker that waits for the call, after the first passes of the step."""
    join_step, is_reached = 4, threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> list[tuple[int, float]]:
        model, wishes = nn.Linear(2, 1), []
        optimizer = sgd(grid, model, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        grid.track(scheduler=scheduler)
        for count, batch in enumerate(grid.batches(DATA, batch_size=2, steps=1000, accumulate=accumulate), 1):
            model(batch).mean().backward()
            if count % accumulate:
                scheduler.step()
                continue
            if number == 1 and grid.step == join_step:
                is_reached.set()
                assert grid._session.connection.wait(lambda here: here.generation > 1, WITHIN_S)
            wishes.append((grid.step, grid.mean(float(number == 0 and grid.step >= join_step))))
            if wishes[-1][1] > 0.0 and grid.step > join_step:
                break
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return wishes

    with new_group(workers=2) as group:
        group.start_all(train)
        assert is_reached.wait(WITHIN_S)
        group.start(train)
        *wishes, newcomer = group.finish()
    assert newcomer == [(join_step, pytest.approx(1 / 3)), (join_step + 1, pytest.approx(1 / 3))]
    assert wishes == [[*((step, 0.0) for step in range(join_step)), *newcomer]] * 2


def train_steps(grid: gridtrain.Grid, start: float, steps: int = 4, skips: int = 0) -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(start)
        model.bias.zero_()
    optimizer = sgd(grid, model, lr=0.1)
    for batch in grid.batches(DATA, batch_size=2, steps=steps):
        (model(batch).mean() * (float("nan") if grid.step < skips else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("differs", [True, False])
def test_a_worker_logs_that_its_initial_weights_were_replaced(
    together: Any, caplog: pytest.LogCaptureFixture, differs: bool
) -> None:
    together(lambda grid, number: train_steps(grid, float(number) if differs else 1.0), 2)
    assert caplog.messages.count("the run has finished; another worker is writing its model") == 1
    lines = [message for message in caplog.messages if "initial weights were replaced" in message]
    assert len(lines) == int(differs), caplog.text


@pytest.mark.parametrize(
    ("skips", "learned"), [(4, "nothing was learned: "), (3, "little was learned: "), (1, ""), (0, "")]
)
def test_a_worker_logs_at_the_end_how_much_was_skipped(
    together: Any, caplog: pytest.LogCaptureFixture, skips: int, learned: str
) -> None:
    together(lambda grid, number: train_steps(grid, 1.0, skips=skips), 2)
    lines = [message for message in caplog.messages if "in skipped steps" in message]
    assert lines == [
        f"{learned}{4 * skips} of 16 samples were in skipped steps, because a gradient was not finite; "
        "check the run's loss, learning rate and data"
    ] * (2 if skips else 0)


@pytest.mark.parametrize("exchanges", [False, True], ids=["step", "exchange, step"])
def test_a_scaler_that_reduces_its_scale_causes_no_warning(
    together: Any, caplog: pytest.LogCaptureFixture, exchanges: bool
) -> None:
    def train(grid: gridtrain.Grid, number: int) -> float:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, lr=0.1)
        scaler = grid.scaler(device="cpu", init_scale=2.0**127)
        for batch in grid.batches(DATA, batch_size=2, steps=4):
            scaler.scale(4.0 * model(batch).mean()).backward()
            if exchanges:
                scaler.unscale_(optimizer)
                optimizer.exchange()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale()

    with caplog.at_level(logging.INFO, "gridtrain"):
        scale, other = together(train, 2)
    assert scale == other < 2.0**127
    skipped = [record for record in caplog.records if "all workers skipped step 1 " in record.message]
    assert len(skipped) == 2 and all(record.levelno == logging.INFO for record in skipped), caplog.text


def test_the_owner_is_told_that_the_final_model_was_not_written(
    new_group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "final.safetensors").mkdir()
    monkeypatch.setattr(PauseController, "await_stop", lambda self, timeout_s: False)
    with new_group(workers=2) as group:
        for _ in range(2):
            group.start(lambda grid, number: train_steps(grid, 1.0))
        results = [group.result(number) for number in range(2)]
        group.wait_for("finished", "model_not_written")
    failed = [number for number, result in enumerate(results) if isinstance(result, ConfigError)]
    assert len(failed) == 1, "the other one has waited for the end of the run, too"
    status = group.coordinator.status()
    assert (status["phase"], status["reason"]) == ("finished", "2 workers reached the end of the run")
    assert status["alert"] == (
        f"the final model was not written: worker-{failed[0]}: Is a directory (see its output); "
        "gridtrain export writes it from any worker's latest checkpoint, if there is one"
    )


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_final_model_that_no_checkpoint_has_is_written_as_soon_as_there_is_room(
    new_group: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_mended: bool,
) -> None:
    waits_s: list[float] = []
    alerts: list[str] = []

    def wait(pauses: PauseController, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        if is_mended and len(waits_s) == 3:
            until_s = time.monotonic() + WITHIN_S
            while not group.coordinator.status()["alert"] and time.monotonic() < until_s:
                threading.Event().wait(0.02)
            alerts.append(group.coordinator.status()["alert"].partition(": free")[0])
            (tmp_path / "final.safetensors").rmdir()
        return False

    (tmp_path / "final.safetensors").mkdir()
    monkeypatch.setattr(PauseController, "await_stop", wait)
    with new_group(workers=1) as group:
        result = group.result(group.start(lambda grid, number: train_steps(grid, 1.0)))
        group.wait_for("finished", "left" if is_mended else "model_not_written")
        assert bool(group.coordinator.status()["alert"]) != is_mended
    lines = [text for text in caplog.messages if "not on this worker's disk" in text]
    assert lines[0] == (
        f"{tmp_path / 'final.safetensors'} cannot be written: Is a directory; the final model is not on "
        "this worker's disk; free 4.36 kB on that disk, or make the folder writable: this worker will try "
        "again every 10 s, for 10 minutes or until Ctrl-C"
    )
    if is_mended:
        assert result is None and (len(waits_s), len(lines)) == (3, 1)
        assert alerts == ["the final model is not written yet: worker-0 could not write it"]
        assert (tmp_path / "final.safetensors").is_file()
    else:
        assert isinstance(result, ConfigError) and "gridtrain export" not in str(result)
        assert (sum(waits_s), len(lines)) == (600.0, 3)


def test_a_final_model_that_a_checkpoint_has_is_not_waited_for(new_group: Any, tmp_path: Path) -> None:
    (tmp_path / "final.safetensors").mkdir()
    with new_group(workers=1) as group:
        options = {"checkpoint_every": 2, "state_dir": str(tmp_path / "state")}
        result = group.result(group.start(lambda grid, number: train_steps(grid, 1.0), **options))
    assert isinstance(result, ConfigError) and "cannot be written: Is a directory" in result.reason
    assert result.remedy.endswith(
        f"; gridtrain export {tmp_path / 'state'} OUT writes it from the latest checkpoint"
    )


def test_the_last_checkpoint_is_written_as_soon_as_there_is_room(
    new_group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits_s: list[float] = []
    last = tmp_path / "state" / "step-00000004"

    def wait(pauses: PauseController, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        if len(waits_s) == 2:
            last.unlink()
        return False

    last.parent.mkdir()
    last.write_text("a checkpoint cannot replace a file")
    monkeypatch.setattr(PauseController, "await_stop", wait)
    with new_group(workers=1) as group:
        options = {"checkpoint_every": 2, "state_dir": str(last.parent)}
        group.result(group.start(lambda grid, number: train_steps(grid, 1.0), **options))
        group.wait_for("finished", "left")
    assert len(waits_s) == 2 and last.is_dir()
    assert caplog.text.count("the checkpoint of the last step is not on this worker's disk") == 1


def test_a_stop_ends_the_wait_for_room_at_once(new_group: Any, tmp_path: Path) -> None:
    (tmp_path / "final.safetensors").mkdir()
    agent = NoAgent()

    def wait(timeout_s: float, known: AgentDirective) -> None:
        waits_s.append(timeout_s)
        agent.directive = AgentDirective(stop=True)

    waits_s: list[float] = []
    agent.wait = wait  # type: ignore[method-assign]
    with new_group(workers=1) as group:
        result = group.result(group.start(lambda grid, number: train_steps(grid, 1.0), owner=agent))
        group.wait_for("finished", "model_not_written")
    assert isinstance(result, ConfigError) and len(waits_s) == 1


def test_a_finished_worker_does_not_wait(new_group: Any, caplog: pytest.LogCaptureFixture) -> None:
    finished, ended = threading.Barrier(3), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> bool:
        train_steps(grid, 1.0)
        finished.wait(60.0)
        assert ended.wait(60.0)
        return grid.finished

    with new_group(workers=2) as group:
        group.start_all(train)
        finished.wait(60.0)
        for key in group.keys.values():
            group.hub.disconnect(key, group.key)
        for _ in range(200):
            if caplog.text.count("this worker is no longer waiting") == 2:
                break
            threading.Event().wait(0.05)
        ended.set()
        assert group.finish() == [True, True]
    assert caplog.text.count("the run has finished, and this worker is no longer waiting") == 2
    assert "tries to reach it again" not in caplog.text and "paused:" not in caplog.text


@pytest.mark.parametrize("state", ["waiting", "training", "paused", "", "finished"])
def test_a_worker_that_was_receiving_the_model_when_the_run_ended_is_not_refused(state: str) -> None:
    def refuse(ready: Any) -> None:
        raise JoinRefused(
            "finished", 'the run "demo" is finished', remedy="ask the run's owner for the result"
        )

    session: Any = GroupSession.__new__(GroupSession)
    session.end_reason, session._joined = "", None
    mailbox = SimpleNamespace(snapshot=WorkerSnapshot(run_state=(state, "")))
    session.connection = SimpleNamespace(wait=refuse, loop=SimpleNamespace(mailbox=mailbox))
    if state in ("", "finished"):
        with pytest.raises(JoinRefused, match="is finished"):
            session._wait(lambda _: False, between_batches=True)
    else:
        assert session._wait(lambda _: False, between_batches=True) is None
        assert session.end_reason == 'the run "demo" is finished'


@pytest.mark.parametrize(
    "exchange", [gridtrain.Dense(), gridtrain.LocalSteps(2, gridtrain.Dense(), overlap=True)]
)
def test_a_worker_that_returns_after_the_end_leaves_its_loop_in_mid_step(
    new_group: Any, caplog: pytest.LogCaptureFixture, exchange: Any
) -> None:
    refusal = JoinRefused("finished", 'the run "demo" is finished')
    in_step, ended = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> bool:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, exchange, lr=0.1)
        is_refused = None
        for batch in grid.batches(DATA, batch_size=2, steps=4):
            if is_refused is None:
                is_refused = grid.is_first
            if not is_refused:
                in_step.set()
                assert ended.wait(60.0)
            model(batch).mean().backward()
            if is_refused:
                assert in_step.wait(60.0)
                grid._session.connection.loop.mailbox.fail(refusal)
            optimizer.step()
        if is_refused:
            ended.set()
            grid._session.end_reason = ""  # as if the loop had ended before it noticed the end of the run
            grid._session.connection.loop.mailbox.fail(refusal)
            assert not grid.is_first, "its model must not be saved as the result"
            assert grid.mean(5.0) == 5.0
        return grid.finished

    with new_group(workers=2) as group:
        group.start_all(train)
        assert group.finish() == [True, True]
    assert re.search(
        "does not hold the final model or a stage of it: its last step was [01]$", caplog.text, re.M
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "the training script ended before the run"),
        (SystemExit(), "the training script ended before the run"),
        (SystemExit(3), "the training script failed with exit code 3"),
        (SystemExit("no data"), "the training script failed with exit code 1"),
        (SystemExit(143), "the training script was stopped (SIGTERM)"),
        (KeyboardInterrupt(), "the training script was interrupted"),
        (ConfigError("lr is -1"), "the training script failed with exit code 2: lr is -1"),
        (
            ValueError("no such file"),
            "the training script failed with exit code 1 (traceback in its output): ValueError: no such file",
        ),
    ],
)
@pytest.mark.parametrize("leaves", ["with", "at exit"])
def test_the_reason_for_leaving_says_how_the_script_ended(
    new_group: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, reason: str, leaves: str
) -> None:
    said: list[str] = []
    close = GroupSession.close

    def record(session: GroupSession, reason: str = "") -> None:
        said.append(reason)
        close(session, reason)

    monkeypatch.setattr(GroupSession, "close", record)

    def leave(grid: gridtrain.Grid, number: int) -> None:
        if leaves == "with":
            with suppress(BaseException), grid:
                if error is not None:
                    raise error
        else:
            monkeypatch.setattr(sys, "last_value", error, raising=False)
            grid._close_at_exit()

    with new_group(workers=1) as group:
        group.result(group.start(leave))
        assert said[0] == reason


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script with the hooks of a worker's process to its end; its own first line is the third."""

    def run(code: str, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
        script = tmp_path / "train.py"
        script.write_text(before + HOOKS + code)
        words = [sys.executable, str(script), *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    return run


HOOKS = """from gridtrain.runtime import process_hooks as hooks
hooks.install_error_hook(), hooks.install_sigterm_handler()
"""
LIBRARY = """from torch.utils._pytree import tree_map
from gridtrain.config import exchange_of
tree_map(exchange_of, ['fast'])
"""
DAMAGED = """import pathlib, safetensors.torch, sys, torch
path = pathlib.Path(sys.argv[1])
safetensors.torch.save_file({'weight': torch.ones(100)}, path)
path.write_bytes(path.read_bytes()[:200])
safetensors.torch.load_file(path)
"""
SINGLE = "train.py, line 4: a batch has a single sample, with which"
REFUSED = "from gridtrain.errors import ConfigError, JoinRefused\nraise "
DISTRIBUTED = """import torch.distributed as dist
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        (LIBRARY, 2, 'train.py, line 5: ConfigError: exchange is "fast", which is'),
        (f"{REFUSED}ConfigError('wrong')", 2, "train.py, line 4: ConfigError: wrong"),
        (
            f"{REFUSED}JoinRefused('banned', 'this worker is banned', remedy='ask the owner')",
            4,
            "train.py, line 4: JoinRefused: this worker is banned -> ask the owner",
        ),
        (f"{DISTRIBUTED}{REFUSED}ConfigError('wrong')", 2, "train.py, line 6: ConfigError: wrong"),
        (DAMAGED, 1, "train.py, line 7: a safetensors file is damaged or incomplete -> "),
        ("import torch\ntorch.nn.SyncBatchNorm(3)(torch.ones(1, 3))", 1, SINGLE),
        ("import torch\ntorch.jit.script(torch.nn.BatchNorm1d(3))(torch.ones(1, 3))", 1, SINGLE),
    ],
    ids=[
        "in a library",
        "wrong settings",
        "refused",
        "torch.distributed",
        "damaged weights",
        "single sample",
        "scripted",
    ],
)
def test_an_error_ends_a_script_with_its_code_and_a_sentence(
    run_script: Any, tmp_path: Path, code: str, exit_code: int, said: str
) -> None:
    """A traceback is printed before only if the error is another library's."""
    done = run_script(code, str(tmp_path / "model.safetensors"))
    assert done.returncode == exit_code
    *traceback, last = done.stderr.splitlines()
    assert last.startswith(f"gridtrain: {said}")
    assert traceback[:1] == (["Traceback (most recent call last):"] if exit_code == 1 else [])
    assert "batch with one sample" in last or "single sample" not in last


@pytest.mark.integration
@pytest.mark.executed  # in a fork the hooks may have been registered before the script's first handler
def test_a_loop_over_a_global_is_closed_before_modules_are_cleared(run_script: Any) -> None:
    """The first handler that was registered is called last, and sees what is left for the interpreter."""
    done = run_script(
        "import atexit, torch, gridtrain\n"
        "from gridtrain.sdk.local_group import LocalGroup\n"
        "grid = LocalGroup().__enter__().join()\n"
        "model, data = torch.nn.Linear(1, 1), torch.ones(64, 1)\n"
        "optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "batches = grid.batches(data, batch_size=4, steps=9)\n"
        "for batch in batches:\n"
        "    raise KeyboardInterrupt\n",
        before="import atexit\natexit.register(lambda: print('closed', batches.gi_frame is None))\n",
    )
    assert done.stdout == "closed True\n", done.stderr


@pytest.mark.integration
@pytest.mark.executed  # as above
@pytest.mark.parametrize("ends_by", ["its exit", "leaving the loop"])
def test_a_forked_child_does_not_close_the_loops_of_its_parent(run_script: Any, ends_by: str) -> None:
    """Such as a process of a `DataLoader`, which would close what it shares with the parent."""
    done = run_script(
        "import os\n"
        "@hooks.closed_at_exit\n"
        "def numbers():\n"
        "    try:\n"
        "        yield 1\n"
        "    finally:\n"
        "        print('closed in', 'parent' if os.getpid() == parent else 'child', flush=True)\n"
        "parent, loop = os.getpid(), numbers()\n"
        "next(loop)\n"
        "if child := os.fork():\n"
        "    os.waitpid(child, 0)\n" + ("else: del loop\n" if ends_by == "leaving the loop" else ""),
        before="import atexit\natexit.register(lambda: os.getpid() == parent or os._exit(0))\n",
    )
    assert done.stdout == "closed in parent\n", done.stderr


@pytest.mark.integration
def test_a_script_that_sigterm_ends_outside_of_with_says_so(run_script: Any) -> None:
    done = run_script(
        "import atexit, os, signal\n"
        "atexit.register(lambda: print(hooks.describe_end(hooks.uncaught_error())))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert (done.returncode, done.stderr) == (143, "")
    assert done.stdout == "the training script was stopped (SIGTERM)\n"


@pytest.mark.parametrize(
    "exchange",
    [
        gridtrain.Dense(),
        gridtrain.GTopK(density=0.5),
        gridtrain.LocalSteps(every=2),
        gridtrain.LocalSteps(every=3, overlap=1),
    ],
    ids=["dense", "gtopk", "local", "overlapped"],
)
def test_a_run_that_its_owner_ends_ends_on_all_workers_after_the_same_step(
    new_group: Any, caplog: pytest.LogCaptureFixture, exchange: Any
) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[bool, int, float, list[list[float]]]:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.999)
        optimizer = grid.optimizer(inner, model, exchange=exchange)
        grid.track(scheduler=scheduler)
        for batch in grid.batches(DATA, batch_size=2, steps=10**6):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if grid.is_first and grid.step == 3 and not ended.is_set():
                ended.set()
                while grid._session.snapshot.run_state[0] != "finished":
                    threading.Event().wait(0.02)
            grid.mean(1.0)  # the others may not call it any more
        steps = scheduler.last_epoch / getattr(exchange, "every", 1)
        return grid.finished, grid.step, steps, [p.tolist() for p in model.parameters()]

    ended, answer = threading.Event(), Future[OperatorReply | Refused]()
    with new_group(workers=3) as group:

        def take_orders() -> Iterator[Any]:
            if ended.is_set() and not answer.running() and not answer.done():
                yield EndRun(), answer

        group.coordinator._dashboard = SimpleNamespace(publish=lambda status: None, take_orders=take_orders)
        group.start_all(train)
        results = group.finish()
    assert results[0] == results[1] == results[2], "the parameters, too"
    finished, step, scheduled, _ = results[0]
    assert finished and 3 <= step == scheduled < 10**6
    assert "its 3 members write the last checkpoints" in answer.result().text
    assert caplog.messages.count(f"the run has finished: its owner has ended it after {step} steps") == 3


def test_a_worker_that_is_started_again_writes_the_model_of_a_run_that_its_owner_ends(
    new_group: Any, tmp_path: Path
) -> None:
    """Both workers have stopped after step 3; only one of them is back, and the run waits for two."""

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, lr=0.1)
        for batch in grid.batches(DATA, batch_size=2, steps=10**6):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if grid.step == 3:
                break

    is_back, answer = threading.Event(), Future[OperatorReply | Refused]()
    options = [{"checkpoint_every": 1, "state_dir": str(tmp_path / name)} for name in ("one", "two")]
    with new_group(workers=2) as group:

        def take_orders() -> Iterator[Any]:
            if is_back.is_set() and not answer.running() and not answer.done():
                yield EndRun(), answer

        group.coordinator._dashboard = SimpleNamespace(publish=lambda status: None, take_orders=take_orders)
        for each in options:
            group.start(train, **each)
        group.finish()
        group.start(train, **options[0])
        group.wait_for("left", "left", "joined")
        is_back.set()
        group.finish()
        status = group.coordinator.status()
    assert (status["phase"], status["step"], status["alert"]) == ("finished", 3, "")
    assert (tmp_path / "final.safetensors").is_file()
    assert max(path.name for path in (tmp_path / "one").glob("step-*")) == "step-00000003"
