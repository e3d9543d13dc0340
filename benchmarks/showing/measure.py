"""What a page with so many workers costs the browser, and what the dashboard costs the daemon.

cd benchmarks && python -m showing.measure --workers 300 --seconds 30
"""

from __future__ import annotations

import argparse
import json
import time

from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.dashboard_service import encoded
from showing.chromium import LOADED, Browser
from showing.simulated import Run
from showing.stage import Stage

WATCH = """
window.seen = {long: [], frames: []};
new PerformanceObserver((list) => list.getEntries().forEach((each) => seen.long.push(each.duration)))
  .observe({entryTypes: ['longtask']});
(function frame(before) { requestAnimationFrame((now) => { seen.frames.push(now - before); frame(now); }); })
  (performance.now());
true
"""


def part(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def in_browser(workers: int, seconds: int) -> dict[str, float]:
    """Milliseconds; the page gets one update a second, as a real one."""
    with Browser() as browser, Stage(Run(workers), past=120) as stage:
        page = browser.page()
        page.open(stage.address)
        page.until(LOADED)
        page.call("Performance.enable")
        page.run(WATCH)
        busy_s = task_s(page.call("Performance.getMetrics"))
        showing_ms = []
        for _ in range(seconds):
            began_s = time.perf_counter()
            stage.play()
            showing_ms.append(1e3 * (time.perf_counter() - began_s))
            time.sleep(1.0)
        busy_s = task_s(page.call("Performance.getMetrics")) - busy_s
        seen = page.run("seen")
    frames = seen["frames"][5:]
    return {
        "long_tasks": len(seen["long"]),
        "longest_task_ms": max(seen["long"], default=0.0),
        "frames": len(frames),
        "frame_median_ms": part(frames, 0.5),
        "frame_p99_ms": part(frames, 0.99),
        "frame_longest_ms": max(frames),
        "main_thread_busy_ms_per_update": 1e3 * busy_s / seconds,
    }


def task_s(metrics: dict[str, list[dict[str, float]]]) -> float:
    return next(each["value"] for each in metrics["metrics"] if each["name"] == "TaskDuration")


def in_the_daemon(workers: int) -> dict[str, float]:
    """Per second of the run: processor time of the dashboard's thread, bytes for each page."""
    board, spent_s, sizes = Board(), 0.0, []
    for at_s, picture, _ in Run(workers).pictures(60):
        began_s = time.process_time()
        board.update(picture, at_s)
        frame = encoded(board.take_changes())
        spent_s += time.process_time() - began_s
        sizes.append(len(frame))
    return {
        "board_ms_per_update": 1e3 * spent_s / 60,
        "bytes_per_update": part([float(size) for size in sizes[2:]], 0.5),
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
