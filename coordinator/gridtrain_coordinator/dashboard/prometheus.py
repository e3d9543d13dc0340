"""The dashboard's figures as Prometheus metrics (/metrics); each start of the coordinator resets counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gridtrain_coordinator.dashboard.board import Board

OF_RUN = {
    "step": ("gridtrain_step", "Latest step of the run."),
    "skipped_samples": ("gridtrain_skipped_samples", "Samples of the run that were in skipped steps."),
    "skipped_in_a_row": ("gridtrain_skipped_in_a_row", "Consecutive skipped steps, up to the latest step."),
    "generation": ("gridtrain_generation", "Number of the current generation."),
    "term": ("gridtrain_term", "Number of times that the coordinator has started."),
    "world_size": ("gridtrain_world_size", "Number of members in the current generation."),
    "loss": ("gridtrain_loss", "Mean of the losses that members report, weighted by their shares."),
    "steps_per_s": ("gridtrain_steps_per_second", "Steps that the run commits per second."),
    "remaining_s": ("gridtrain_remaining_seconds", "Predicted seconds until the end of the run."),
    "samples_per_s": ("gridtrain_samples_per_second", "Samples that all members process per second."),
    "sent_Bps": ("gridtrain_sent_bytes_per_second", "Bytes that all workers send per second."),
    "uptime_s": ("gridtrain_uptime_seconds", "Seconds since the coordinator started."),
}
OF_WORKER = {
    "step": ("gridtrain_worker_step", "Latest step that the worker reports."),
    "rank": ("gridtrain_worker_rank", "Rank of the worker in the current generation."),
    "share": ("gridtrain_worker_share_samples", "Samples that the worker processes in a step."),
    "strikes": ("gridtrain_worker_strikes", "Violations that count against the worker."),
    "heard_s": ("gridtrain_worker_heard_seconds", "Seconds since the worker's last message."),
    "computing_s": ("gridtrain_worker_computing_seconds", "Seconds spent computing in the latest step."),
    "selecting_s": ("gridtrain_worker_selecting_seconds", "Seconds spent selecting in the latest step."),
    "communicating_s": (
        "gridtrain_worker_communicating_seconds",
        "Seconds spent communicating in the latest step.",
    ),
    "waiting_s": ("gridtrain_worker_waiting_seconds", "Seconds spent waiting for others in the latest step."),
    "loss": ("gridtrain_worker_loss", "Loss that the worker reports."),
}
COUNTED = {
    "sent_bytes": ("gridtrain_worker_sent_bytes", "Bytes that the worker has sent since its start."),
    "received_bytes": (
        "gridtrain_worker_received_bytes",
        "Bytes that the worker has received since its start.",
    ),
    "missed_steps": (
        "gridtrain_worker_missed_steps",
        "Steps that the group committed without the worker, because its training loop had stalled.",
    ),
}
PHASES = ("waiting", "training", "paused", "finished")


class _BoardCollector(Collector):
    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        run = self._board.run
        if not run:
            return
        for name, (metric, text) in OF_RUN.items():
            if run[name] is not None:
                yield GaugeMetricFamily(metric, text, value=run[name])
        text = "1 for the current phase of the run, 0 for other phases."
        phase = GaugeMetricFamily("gridtrain_phase", text, labels=["run", "phase"])
        for phase_name in PHASES:
            phase.add_metric([run["run"], phase_name], float(run["phase"] == phase_name))
        yield phase
        states = GaugeMetricFamily("gridtrain_workers", "Number of workers by state.", labels=["state"])
        for state, count in run["workers"].items():
            states.add_metric([state], count)
        yield states
        sent = "Bytes that workers have sent for exchanges."
        dense = "Bytes that a dense ring of float32 would have sent for the same steps."
        yield CounterMetricFamily("gridtrain_exchanged_bytes", sent, value=run["exchanged_bytes"])
        yield CounterMetricFamily("gridtrain_dense_bytes", dense, value=run["dense_bytes"])
        text = "Number of events in the coordinator's log."
        events = CounterMetricFamily("gridtrain_events", text, labels=["event"])
        for event, count in sorted(self._board.event_counts.items()):
            events.add_metric([event], count)
        yield events
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        rows = [row for row in self._board.workers() if "departed_s" not in row]
        present = [row for row in rows if row["reach"] or row["rank"] is not None]
        labels = [[row["name"], row["peer"][:12]] for row in present]
        families: Any = (GaugeMetricFamily, OF_WORKER), (CounterMetricFamily, COUNTED)
        for family, names in families:
            for name, (metric, text) in names.items():
                metric_family = family(metric, text, labels=["worker", "peer"])
                for label, row in zip(labels, present, strict=True):
                    value = row[name]
                    if name == "missed_steps" and row["sent_bytes"] is not None:
                        value = value or 0.0  # workers report missed steps only once there are any
                    if value is not None:
                        metric_family.add_metric(label, value)
                yield metric_family


def exposition(board: Board) -> bytes:
    """Return the metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_BoardCollector(board))
    return generate_latest(registry)
