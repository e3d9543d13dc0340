"""Measures what the dashboard costs the daemon (docs/dashboard.md): CPU time, and bytes for each open page.

cd tests/common && python -m dashboard_demo.measure --workers 300
"""

from __future__ import annotations

import argparse
import statistics
import time

from dashboard_demo.simulated_run import Run
from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.dashboard_service import encoded

SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=300)
    board, spent_s, sizes = Board(), 0.0, []
    for at_s, status, _ in Run(parser.parse_args().workers).statuses(SECONDS):
        began_s = time.process_time()
        board.update(status, at_s)
        frame = encoded(board.take_changes())
        spent_s += time.process_time() - began_s
        sizes.append(len(frame))
    update_kB, opening_kB = statistics.median(sizes[2:]) / 1e3, len(encoded(board.full_state())) / 1e3
    print(
        f"an update: {1e3 * spent_s / SECONDS:.1f} ms of CPU time, and {update_kB:.1f} kB for each page, "
        f"which begins with {opening_kB:.1f} kB"
    )


if __name__ == "__main__":
    main()
