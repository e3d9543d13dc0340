"""Measures what a page with many workers costs the browser, and what the dashboard costs the daemon.

cd benchmarks && python -m dashboard_demo.measure --workers 300 --seconds 30
"""

from __future__ import annotations

import argparse
import json
import time

from dashboard_demo.chromium import LOADED, Browser
from dashboard_demo.server import DemoServer
from dashboard_demo.simulated_run import Run
from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.dashboard_service import encoded

RECORD_FRAMES = """
window.seen = {long: [], frames: []};
new PerformanceObserver((list) => list.getEntries().forEach((each) => seen.long.push(each.duration)))
  .observe({entryTypes: ['longtask']});
(function frame(before) { requestAnimationFrame((now) => { seen.frames.push(now - before); frame(now); }); })
  (performance.now());
true
"""


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def in_browser(workers: int, seconds: int) -> dict[str, float]:
    """Measure a page that receives one update a second; times are in milliseconds."""
    with Browser() as browser, DemoServer(Run(workers), past=120) as demo:
        page = browser.page()
        page.open(demo.address)
        page.until(LOADED)
        page.call("Performance.enable")
        page.run(RECORD_FRAMES)
        busy_s = task_s(page.call("Performance.getMetrics"))
        for _ in range(seconds):
            demo.advance()
            time.sleep(1.0)
        busy_s = task_s(page.call("Performance.getMetrics")) - busy_s
        seen = page.run("seen")
    frames = seen["frames"][5:]
    return {
        "long_tasks": len(seen["long"]),
        "longest_task_ms": max(seen["long"], default=0.0),
        "frames": len(frames),
        "frame_median_ms": percentile(frames, 0.5),
        "frame_p99_ms": percentile(frames, 0.99),
        "frame_longest_ms": max(frames),
        "main_thread_busy_ms_per_update": 1e3 * busy_s / seconds,
    }


def task_s(metrics: dict[str, list[dict[str, float]]]) -> float:
    return next(each["value"] for each in metrics["metrics"] if each["name"] == "TaskDuration")


def in_the_daemon(workers: int) -> dict[str, float]:
    """Measure the CPU time of the dashboard's thread and the bytes for each page, per second of the run."""
    board, spent_s, sizes = Board(), 0.0, []
    for at_s, status, _ in Run(workers).statuses(60):
        began_s = time.process_time()
        board.update(status, at_s)
        frame = encoded(board.take_changes())
        spent_s += time.process_time() - began_s
        sizes.append(len(frame))
    return {
        "board_ms_per_update": 1e3 * spent_s / 60,
        "bytes_per_update": percentile([float(size) for size in sizes[2:]], 0.5),
        "bytes_at_opening": float(len(encoded(board.full_state()))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=300)
    parser.add_argument("--seconds", type=int, default=30)
    chosen = parser.parse_args()
    found = in_the_daemon(chosen.workers) | in_browser(chosen.workers, chosen.seconds)
    print(json.dumps({name: round(value, 2) for name, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()
