"""DDP with the gTop-k hook, in real processes over loopback.

P = 4, 105 integers in buckets:  residuals before + contributions == residuals after + update, exactly
P = 3, 4, a small network:       equal bits everywhere after each step, and it learns
"""

import gc
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import gridtrain
from gridtrain.adapters.ddp import GTopKState, gtopk_hook

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).parent / "scripts" / "ddp_hook.py"
WITHIN_S = 240.0


def train(folder: Path, world_size: int, kind: str, topology: str) -> list[list[dict]]:
    """The lines of each rank."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"rank{rank}.jsonl" for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), str(rank), str(world_size)),
                *(str(folder / "rendezvous"), str(output), kind, topology),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        errors = [process.communicate(timeout=WITHIN_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(errors)
    return [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]


@pytest.mark.parametrize("topology", ["auto", "direct"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_replicas_are_equal_bit_for_bit_and_learn(tmp_path, world_size, topology) -> None:
    ranks = train(tmp_path, world_size, "real", topology)
    ends = [lines.pop() for lines in ranks]
    for at_step in zip(*ranks, strict=True):
        assert len({line["digest"] for line in at_step}) == 1, f"step {at_step[0]['step']}"
    losses = [sum(line["loss"] for line in at_step) / world_size for at_step in zip(*ranks, strict=True)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert all(end["reloaded"] and len(end["saved"]) == 6 for end in ends)
    assert all(end["seen"] and end["unchanged"] for end in ends)


@pytest.mark.parametrize("topology", ["auto", "direct"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_no_gradient_is_lost_also_where_ddp_rebuilds_its_buckets(tmp_path, world_size, topology) -> None:
    ranks = train(tmp_path, world_size, "whole", topology)
    layouts = [line["buckets"] for line in ranks[0]]
    assert layouts[0] != layouts[1] and all(layout == layouts[1] for layout in layouts[1:])
    for lines in ranks:
        assert all(0 < line["sent"] < 105 for line in lines)
        assert lines[-1]["left"] > 0
        if world_size == 4:  # every weight is a power of two
            assert [line["error"] for line in lines] == [0.0] * len(lines)
        bound = (2 + 3) * 2.0**-23  # (log2 P + 3) units in the last place of all that is summed
        assert max(line["relative"] for line in lines) <= bound


@pytest.fixture
def alone(monkeypatch):
    """A process group of this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_state_that_is_collected_leaves_its_group_to_the_end_of_the_process(alone):
    """torch names a new group by the number of groups: after one was destroyed the name would be taken."""
    state = GTopKState()
    channel = state._channel
    del state
    gc.collect()
    assert dist.get_process_group_ranks(channel.group) == [0]
    GTopKState()
    group = channel.group
    channel.close()
    channel.close()
    with pytest.raises(ValueError):
        dist.destroy_process_group(group)


class Scaler(torch.amp.GradScaler):
    """Of these scales, one for each step."""

    def __init__(self, scales):
        super().__init__("cpu")
        self.scales = scales

    def get_scale(self):
        return self.scales[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_was_not_sent_is_of_no_scale(alone, device):
    """Given (4 3 2 1) five times; the scale halves after the second: applied + residual == given."""
    layer = nn.Linear(4, 1, bias=False).to(device)
    ddp = nn.parallel.DistributedDataParallel(layer)
    scaler = Scaler([1024.0, 1024.0, 512.0, 512.0, 512.0])
    state = GTopKState(gridtrain.GTopK(density=0.25, values="fp32"), scaler=scaler)
    ddp.register_comm_hook(state, gtopk_hook)
    applied = torch.zeros(4)
    while scaler.scales:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            (ddp(torch.tensor([[4.0, 3.0, 2.0, 1.0]]).to(device)).sum() * scaler.get_scale()).backward()
            applied += (layer.weight.grad[0] / scaler.scales.pop(0)).cpu()
            layer.weight.grad = None
    assert (applied + state.residual_of(layer.weight)).tolist() == [20.0, 15.0, 10.0, 5.0]


def test_chunks_and_decay(alone):
    """The largest of each half is sent; half of the rest is dropped, and counted."""
    layer = nn.Linear(8, 1, bias=False)
    ddp = nn.parallel.DistributedDataParallel(layer)
    exchange = gridtrain.GTopK(density=0.5, values="fp32", chunk=4, residual_decay=0.5)
    state = GTopKState(exchange)
    ddp.register_comm_hook(state, gtopk_hook)
    ddp(torch.tensor([[9.0, 8.0, 7.0, 6.0, 4.0, 3.0, 2.0, 1.0]])).sum().backward()
    assert layer.weight.grad[0].tolist() == [9, 8, 0, 0, 4, 3, 0, 0]
    assert state.residual_of(layer.weight).flatten().tolist() == [0, 0, 3.5, 3, 0, 0, 1, 0.5]
    assert state.decayed_magnitude == 8.0


def test_the_default_device_and_dtype_are_not_those_of_messages_and_residuals(alone, monkeypatch):
    sent = []

    def keep(tensor, dst, group=None, tag=0):  # as in torch 2.4
        assert dst == 5 and group is state._channel.group
        sent.append(tensor)
        return SimpleNamespace(wait=lambda: None)

    def take(tensor, src=None, group=None, tag=0):
        assert src == 5 and group is state._channel.group
        tensor.copy_(sent.pop(0))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", keep)
    monkeypatch.setattr(dist, "irecv", take)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank + 5)
    layer = nn.Linear(2, 1, bias=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            state = GTopKState(gridtrain.GTopK(density=0.5))
            state._channel.send(0, [7], b"payload")
            assert state._channel.receive(0, 7) == ([7, 0, 0, 0, 0, 0], b"payload")
            mean_B = torch.ones(2, dtype=torch.float32, device="cpu")
            before = state.residual_of(layer.weight)
            after = state._bucket_for((layer.weight,), mean_B).feedback.residual_N
    finally:
        torch.set_default_dtype(torch.float32)
    for residual in (before, after):
        assert residual.tolist() == [0.0, 0.0] and residual.dtype == torch.float32


def test_a_sum_that_half_precision_does_not_hold_leaves_residuals_alone(alone):
    layer = nn.Linear(2, 1, bias=False).half()
    ddp = nn.parallel.DistributedDataParallel(layer)
    state = GTopKState(gridtrain.GTopK(density=0.5, values="fp32"))
    ddp.register_comm_hook(state, gtopk_hook)
    for _ in range(2):  # 60,000 is sent first, then twice 59,008, which is beyond 65,504
        ddp(torch.tensor([[60_000.0, 59_008.0]]).half()).sum().backward()
        seen, layer.weight.grad = layer.weight.grad[0].tolist(), None
    assert seen == [0.0, torch.inf]
    assert state.residual_of(layer.weight).tolist() == [0.0, 59_008.0]


def test_on_a_gpu_updates_wait_for_their_selection_but_not_for_backward(alone, monkeypatch):
    """The thread has a stream of its own, which waits for what `prepare` has queued, then works on it."""
    told = []

    class Stream:
        def __init__(self, device):
            told.append(f"new on {device}")

        def wait_event(self, event):
            told.append(f"waits for {event}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    state = GTopKState()
    with state._own_stream(None, torch.device("cpu")) as nothing:
        assert nothing is None and told == []
    with state._own_stream("the first selection", torch.device("cuda", 1)) as first:
        assert told == ["new on cuda:1", "waits for the first selection"]
    with state._own_stream("the second", torch.device("cuda", 1)) as second:
        assert told[2:] == ["waits for the second"] and second is first
