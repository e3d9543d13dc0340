"""A site of two processes and a single worker, over loopback.

torchrun -- 2 processes, gloo between them --+-- leader --+
                                             |            +-- run
single ---------------------------------------------------+
"""

import json
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gridtrain.adapters import site
from gridtrain.config import Overlap
from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint.frozen_base import FrozenBase

pytestmark = pytest.mark.integration
SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLE = Path(__file__).parents[2] / "examples" / "site.py"
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
)
STEPS, BATCH = 20, 4


@pytest.fixture(autouse=True)
def loopback(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_site_and_a_single_worker_hold_the_same_model(new_group) -> None:
    script = (str(SCRIPTS / "run_example.py"), str(EXAMPLE), str(STEPS))
    with new_group(min_workers=2) as group:
        group.start("site", *TORCHRUN, *script)
        group.start("single", sys.executable, *script)
        ends = group.finish()
        pair, alone = group.workers["site"].marked("end"), group.workers["single"].marked("end")
    assert len(pair) == 2 and len(alone) == 1 and len(ends) == 3
    assert len({end["digest"] for end in ends}) == 1
    leader, other = sorted(pair, key=lambda end: not end["samples"])
    assert len(leader["samples"]) == 2 * BATCH * STEPS, "the share counts all samples of the site"
    assert other["samples"] == [], "only the leader asks the run for samples"
    assert len(alone[0]["samples"]) == BATCH * STEPS
    assert len(set(chain(leader["samples"], alone[0]["samples"]))) == 3 * BATCH * STEPS
    assert leader["losses"] != other["losses"], "both processes had the same samples"
    for end in ends:
        assert len(end["losses"]) == STEPS
        assert end["losses"][-1] < end["losses"][0] - 0.3, end["losses"]


@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", "ValueError: a bad sample"), ("killed", "process 1 of this site has disconnected")],
)
def test_a_failure_inside_makes_the_leader_leave_with_the_reason(new_group, how, says) -> None:
    with new_group(min_workers=1, codes=frozenset({0, 1})) as group:
        group.start("site", *TORCHRUN, str(SCRIPTS / "failing_site.py"), how)
        group.wait("the site's end", lambda: group.workers["site"].code is not None)
        reasons = [line for line in group.coordinator.lines if says in str(line)]
        assert group.workers["site"].code == 1
        assert reasons, group.coordinator.tail()
        assert "gloo" not in str(reasons)


def end_of_pair(folder: Path, how: str, script: str = "ending_site.py") -> list[tuple[int, str]]:
    """The exit code and the output of both processes of the script, which must end by themselves."""
    with ExitStack() as stack:
        pair = []
        for rank in "01":
            command = [sys.executable, str(SCRIPTS / script), rank, str(folder / "rendezvous"), how]
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            pair.append(stack.enter_context(subprocess.Popen(command, **pipes)))
            stack.callback(pair[-1].kill)
        outputs = [process.communicate(timeout=60)[0] for process in pair]
        return [(process.returncode, output) for process, output in zip(pair, outputs, strict=True)]


@pytest.mark.parametrize(
    ("how", "codes", "first", "second"),
    [
        (
            "0 raises",
            (1, 1),
            "closed: ValueError: a bad sample",
            "the leader of this site ended: ValueError: a bad sample",
        ),
        (
            "0 breaks",
            (0, 1),
            "closed: the training script ended",
            "the leader of this site ended: the training script ended",
        ),
        ("1 raises", (1, 1), "closed: process 1 of this site failed: ValueError", "ValueError: a bad sample"),
        ("1 raises after the step", (1, 1), "process 1 of this site failed: ValueError", "a bad file"),
        ("0 waits", (1, 1), "closed: process 1 of this site has not answered for 0.1 s", "Traceback"),
        ("break", (0, 0), "closed: the training script ended", ""),
        ("SIGTERM", (143, 143), "closed: its site was stopped", ""),
        ("SIGINT", (-2, -2), "closed: the training script was interrupted", "interrupted"),
    ],
)
def test_when_some_processes_end_all_do_and_say_why(tmp_path, how, codes, first, second) -> None:
    ends = end_of_pair(tmp_path, how)
    assert tuple(code for code, _ in ends) == codes, ends
    for (_, output), text in zip(ends, (first, second), strict=True):
        assert "stepped" in output and text in output, output
    if "raises" in how:
        raising = int(how[0])
        assert "Traceback" in ends[raising][1], "the script's traceback is missing"


def test_a_branch_that_one_process_uses_is_updated_and_one_that_none_uses_is_skipped(tmp_path) -> None:
    by_step = [("a", "b"), ("b", "b"), ("a", "ab"), ("", "a"), ("a", "")]  # by process
    ends = end_of_pair(tmp_path, json.dumps(by_step), "branching_site.py")
    assert [code for code, _ in ends] == [0, 0], ends
    whole = nn.ParameterDict({branch: torch.ones(1) for branch in "ab"})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for used in by_step:
        losses = [(whole[b] * x).square() / 2 for x, each in zip((1, 2), used, strict=True) for b in each]
        torch.cat(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _, output in ends:
        assert json.loads(output.splitlines()[-1]) == pytest.approx({b: whole[b].item() for b in "ab"})


def test_the_leader_may_wait_for_the_run_for_days_but_not_for_a_process() -> None:
    timeouts_s = []

    def receive(rank: int, most_bytes: int, timeout_s: float) -> tuple[list[int], bytes]:
        timeouts_s.append(timeout_s)
        return [site._SiteMessage.READY], b""

    for rank in (0, 1):
        channel: Any = SimpleNamespace(rank=rank, world_size=2, receive=receive)
        site.Site(None, channel)._listen(1 - rank, 0)
    of_process, of_leader = timeouts_s
    assert of_process <= 1800.0 and of_leader >= 30 * 86400.0


def test_frozen_parameters_are_compared_once_and_never_sent(new_group) -> None:
    with new_group(min_workers=1) as group:
        group.start("site", *TORCHRUN, str(SCRIPTS / "frozen_site.py"))
        group.finish()
        ends = group.workers["site"].marked("end")
    trained, statistics, count = 33, 64, 1
    assert [end["sent"] for end in ends] == [[trained + statistics, count] * 4] * 2
    assert ends[0]["trained"] == ends[1]["trained"]


@pytest.mark.parametrize("rule", ["exact", "any"])
def test_a_process_with_another_base_is_refused_with_both_digests(rule) -> None:
    bases = [FrozenBase(nn.Linear(2, 2).requires_grad_(False), rule=rule) for _ in range(2)]
    told = [site._SiteMessage.BASE], bases[1].describe().encode()
    channel: Any = SimpleNamespace(rank=0, world_size=2, receive=lambda *_: told)
    with nullcontext() if rule == "any" else pytest.raises(ConfigError) as refusal:
        site.Site(None, channel)._compare_bases(bases[0])
    if refusal is not None:
        there, here = (base.describe() for base in reversed(bases))
        text = f"the leader's: {there} in that process and {here} in the leader"
        assert refusal.value.reason.endswith(text)


@pytest.mark.parametrize("option", [{"overlap": Overlap()}, {"weigh_by": "tokens"}])
def test_what_a_site_cannot_do_is_refused(option) -> None:
    model = nn.Linear(1, 1)
    channel: Any = SimpleNamespace(rank=1, world_size=2)
    with pytest.raises(ConfigError, match=f"remove the argument {next(iter(option))}="):
        site.Site(None, channel).optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **option)


def test_a_process_of_a_site_takes_a_list_of_optimizers() -> None:
    model = nn.Linear(1, 1)
    channel: Any = SimpleNamespace(rank=1, world_size=2, send=lambda *message: None)
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    joint = site.Site(None, channel).optimizer(each, model)
    assert joint.param_groups == [group for optimizer in each for group in optimizer.param_groups]


def test_a_model_whose_gradients_torch_combines_is_refused() -> None:
    """On the leader and on another process."""
    done = subprocess.run(
        (sys.executable, str(SCRIPTS / "refused_models.py")), capture_output=True, text=True, timeout=60.0
    )
    kinds = ("DistributedDataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DTensor")
    expected = [f"the model has parts of type {kind}" for kind in kinds for _ in range(2)]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def test_the_calls_of_torch_are_those_of_its_oldest_version(monkeypatch) -> None:
    """Since torch 2.6 a rank may be given as one of a group."""
    called: list[tuple[str, int]] = []

    def broadcast(tensor, src, group=None, async_op=False):  # as in torch 2.4
        called.append(("broadcast", src))

    def reduce(tensor, dst, op=None, group=None, async_op=False):
        called.append(("reduce", dst))

    monkeypatch.setattr(site.dist, "broadcast", broadcast)
    monkeypatch.setattr(site.dist, "reduce", reduce)
    channel: Any = SimpleNamespace(rank=1, world_size=2, send=lambda *message: None)
    process = site.Site(None, channel)
    model = nn.Linear(2, 1)
    process.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    monkeypatch.setattr(process, "_await_announcement", lambda: None)
    process._share_state()
    process.sum_up(torch.ones(3))
    assert called == [("broadcast", 0), ("reduce", 0)]


def test_parts_are_near_equal_and_cover_the_step() -> None:
    assert [site._share_of(range(10, 17), rank, 3) for rank in range(3)] == [[10, 11], [12, 13], [14, 15, 16]]
    assert [site._share_of([5], rank, 3) for rank in range(3)] == [[], [], [5]]


@pytest.mark.parametrize(
    ("sizes", "is_one"),
    [
        ({"batch_size": 2}, False),
        ({"global_batch_size": 3}, False),
        ({"batch_size": 1}, True),
        ({"global_batch_size": 2}, True),
    ],
)
def test_a_process_whose_part_is_a_single_sample_trains_on_it(sizes, is_one, monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3))
    channel: Any = SimpleNamespace(rank=0, world_size=2, receive=lambda *_: None, send=lambda *message: None)
    process = site.Site(None, channel)
    optimizer = process.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    monkeypatch.setattr(process, "_follow", lambda: iter([[0, 1, 2, 3], [4, 5], [6]]))
    monkeypatch.setattr(process, "sum_up", lambda flat_N: None)
    data, samples = list(torch.arange(8.0)[:, None]), []
    is_refused = pytest.raises(ConfigError, match="cannot train on a single sample")
    with is_refused if is_one else nullcontext():
        for x in process.batches(data, steps=3, **sizes):
            model(x).sum().backward()
            optimizer.step()
            samples.append(x.flatten().tolist())
    # without a part of its own: the site's samples, at most two, as a stand-in
    assert samples == ([[0, 1]] if is_one else [[0, 1], [4], [6]])
