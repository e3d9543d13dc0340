"""One of P processes that train with DDP and the gTop-k hook; one JSON line a step goes to a file.

    ddp_hook.py RANK P RENDEZVOUS OUTPUT real|whole TOPOLOGY

real    a small network; what each process knows: loss, digest of the model, and how exactly the law holds:
        sum of residuals after + update == sum of residuals before + contributions
whole   the same with integer gradients and P a power of two, where every sum is exact
"""

import datetime
import gc
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gridtrain
from gridtrain.adapters.ddp import GTopKState, gtopk_hook

STEPS = 40
WITHIN = datetime.timedelta(seconds=60)


class Crossed(nn.Module):
    """Its layers are not used in the order of their registration: DDP's buckets change after step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(12, 1), nn.Linear(6, 16), nn.Linear(16, 12)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x_BF)))))


class Whole(nn.Module):
    """Linear in its parameters: integer inputs make integer gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.a, self.c = (nn.Parameter(torch.zeros(7, 5)) for _ in range(3))

    def forward(self, x_PF: torch.Tensor) -> torch.Tensor:
        return sum(((i + 1) * (p * x_PF).sum() for i, p in enumerate((self.a, self.b, self.c))), x_PF.sum())


def batch(model: nn.Module, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    if isinstance(model.module, Whole):
        return torch.randint(-9, 10, (7, 5), generator=source).float(), torch.zeros(())
    x_BF = torch.randn(16, 6, generator=source)
    return x_BF, x_BF.sum(dim=1, keepdim=True)


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, output, kind, topology = sys.argv[3], Path(sys.argv[4]), *sys.argv[5:7]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", WITHIN, world_size, rank)
    torch.manual_seed(5)
    ddp = DistributedDataParallel(Whole() if kind == "whole" else Crossed(), bucket_cap_mb=0.0005)
    parameters = list(ddp.parameters())
    exchange = gridtrain.GTopK(density=0.2, momentum=0.5, topology=topology)
    if kind == "whole":
        exchange = gridtrain.GTopK(density=0.1, topology=topology)
    state = GTopKState(exchange)
    local: dict[int, torch.Tensor] = {}
    layout: list[list[int]] = []

    def watched(state: GTopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        members = [next(i for i, p in enumerate(parameters) if p is q) for q in bucket.parameters()]
        layout.append(members)
        local.update(
            {i: g.detach().clone().flatten() for i, g in zip(members, bucket.gradients(), strict=True)}
        )
        return gtopk_hook(state, bucket)

    ddp.register_comm_hook(state, watched)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    with output.open("w") as lines:
        for step in range(STEPS):
            layout.clear()
            before = kept(state, parameters)
            x, y = batch(ddp, step, rank)
            loss = ddp(x) if kind == "whole" else (ddp(x) - y).square().mean()
            loss.backward()
            entry = {"step": step, "loss": loss.item(), "buckets": list(layout)}
            if not state.exchange.momentum:  # with it, "contribution" reads as the new u
                entry |= law(state, parameters, before, local, world_size)
            optimizer.step()
            optimizer.zero_grad()
            entry["digest"] = hashlib.sha256(kept_of(parameters).numpy().tobytes()).hexdigest()
            lines.write(json.dumps(entry) + "\n")
    if kind == "real":
        saved = state.state_dict(ddp)
        again = GTopKState(exchange)
        again.load_state_dict(ddp.module, saved)
        whole = all(torch.equal(again.residual_of(p), state.residual_of(p)) for p in parameters)
        refused = skips_on_all(ddp, state, rank)
        with output.open("a") as lines:
            lines.write(json.dumps({"saved": sorted(saved), "reloaded": whole, **refused}) + "\n")
    # Otherwise DDP destroys the group with the GIL held, for which the thread of the group may be waiting.
    del ddp
    gc.collect()
    dist.destroy_process_group()


def kept(state: GTopKState, parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([state.residual_of(p) for p in parameters])


def kept_of(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def law(state, parameters, before, local, world_size) -> dict[str, float]:
    """Summed over all processes in float64; the update counts once."""
    contribution = torch.cat([local[i] * torch.tensor(1.0 / world_size) for i in range(len(parameters))])
    after = kept(state, parameters)
    update = torch.cat([p.grad.flatten() for p in parameters])
    sums = torch.stack(
        [after.double() - before.double() - contribution.double(), contribution.abs().double()]
    )
    sums[1] += before.abs().double()
    dist.all_reduce(sums)
    error = (sums[0] + update.double()).abs()
    return {
        "error": error.max().item(),
        "relative": (error / sums[1].clamp_min(1e-30)).max().item(),
        "sent": int(update.count_nonzero()),
        "left": after.abs().sum().item(),
    }


def skips_on_all(ddp: nn.Module, state: GTopKState, rank: int) -> dict[str, bool]:
    """One process has an infinite gradient: all see it, and no residual changes."""
    parameters = list(ddp.parameters())
    before = kept(state, parameters)
    x, y = batch(ddp, STEPS, rank)
    loss = (ddp(x) - y).square().mean() * (float("inf") if rank == 1 else 1.0)
    loss.backward()
    seen = any(p.grad.isnan().any().item() for p in parameters)
    return {"seen": seen, "unchanged": torch.equal(kept(state, parameters), before)}


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of gloo that still hold tensors may abort an interpreter that ends
