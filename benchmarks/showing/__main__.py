"""`python -m showing --workers 300`: the real dashboard over a simulated run, on this machine.

cd benchmarks && python -m showing --workers 40 --shape tree --past 1200
"""

from __future__ import annotations

import argparse
import contextlib
import time

from showing.simulated import EXCHANGES, REASONS, Run
from showing.stage import Stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=40)
    parser.add_argument("--shape", choices=EXCHANGES, default="butterfly")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--state", choices=("training", "resting", *REASONS), default="training")
    parser.add_argument("--past", type=int, default=900, help="seconds that have been trained already")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--listen", default="127.0.0.1:0")
    chosen = parser.parse_args()
    run = Run(chosen.workers, chosen.shape, seed=chosen.seed, stages=chosen.stages, state=chosen.state)
    with Stage(run, past=chosen.past, listen=chosen.listen) as stage, contextlib.suppress(KeyboardInterrupt):
        print(stage.url, flush=True)
        while True:
            time.sleep(1.0)
            stage.play()


if __name__ == "__main__":
    main()
