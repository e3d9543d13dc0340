"""`python -m dashboard_demo --workers 300`: the real dashboard over a simulated run, on this machine.

cd tests/common && python -m dashboard_demo --workers 40 --shape tree --past 1200
"""

from __future__ import annotations

import argparse
import contextlib
import time

from dashboard_demo.server import DemoServer
from dashboard_demo.simulated_run import EXCHANGES, REASONS, Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=40)
    parser.add_argument("--shape", choices=EXCHANGES, default="butterfly")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--state", choices=("training", "resting", *REASONS), default="training")
    parser.add_argument("--past", type=int, default=900, help="seconds of training before the start")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--listen", default="127.0.0.1:0")
    chosen = parser.parse_args()
    run = Run(chosen.workers, chosen.shape, seed=chosen.seed, stages=chosen.stages, state=chosen.state)
    with (
        DemoServer(run, past=chosen.past, listen=chosen.listen) as demo,
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(demo.url, flush=True)
        while True:
            time.sleep(1.0)
            demo.advance()


if __name__ == "__main__":
    main()
