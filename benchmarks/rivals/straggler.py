"""A worker of `stragglers.py hivemind`: hivemind's optimizer while one training loop stalls.

The model's shape and the stalls are those of `stragglers.py one`; the data are random.  hivemind's settings
favour it: the group is complete before the first batch, progress is exchanged often, and its virtual batch
(`EPOCH_BATCHES` of each worker) is so large that matchmaking does not dominate the run without stalls.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import hivemind
import torch
from torch import nn

from rivals.contract import leave
from rivals.hivemind import start_dht
from rivals.rendezvous import Rendezvous
from stalls import (
    BATCH_SIZE,
    ONE_COMPUTE_S,
    ONE_EVERY,
    ONE_STALL_S,
    WARM_UP_BATCHES,
    Stalls,
    Straggling,
    make_model,
)

EPOCH_BATCHES, MATCHMAKING_S = 40, 0.5
REFRESH_S = {"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5}
"""Intervals at which a worker requests the others' progress."""


def main() -> None:
    options = Straggling.from_argv()
    torch.set_num_threads(1)
    model = make_model()
    is_stalled = options.is_stalled and options.rank == options.world - 1
    stalls = Stalls(every=ONE_EVERY, stall_s=ONE_STALL_S) if is_stalled else Stalls()
    with Rendezvous(options) as group:
        dht = start_dht(options, group)
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="stragglers",
            params=model.parameters(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size_per_step=BATCH_SIZE,
            target_batch_size=BATCH_SIZE * options.world * EPOCH_BATCHES,
            matchmaking_time=MATCHMAKING_S,
            averaging_timeout=30.0,
            tracker_opts=REFRESH_S,
        )
        group.barrier()
        began_s, began_epoch = 0.0, 0
        for batch in range(1, options.batches + 1):
            if batch == WARM_UP_BATCHES:
                began_s, began_epoch = time.monotonic(), optimizer.local_epoch
            stalls.batch(ONE_COMPUTE_S)
            inputs, labels = torch.randn(BATCH_SIZE, 20), torch.randint(0, 10, (BATCH_SIZE,))
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds, epochs = time.monotonic() - began_s, optimizer.local_epoch - began_epoch
        Path(options.out).write_text(json.dumps({"seconds": seconds, "epochs": epochs}))
        group.barrier()  # no rank ends its optimizer while another one still averages
        optimizer.shutdown()
        dht.shutdown()


if __name__ == "__main__":
    main()
    leave()
