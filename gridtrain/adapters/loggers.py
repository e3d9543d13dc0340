"""Writes metrics to TensorBoard, Weights & Biases, MLflow and others, on the group's first worker only.

    log = Log(grid, TensorBoard("runs/mine"), WeightsAndBiases(project="mine", run=grid.run_id))
    for batch in grid.batches(...):
        ...
        log(loss=grid.mean(loss))
    log.close()

Only the first worker of the generation writes, so that a run yields one curve.  When that worker leaves, the
new first worker continues with its own writers, which it opens only then; with `run=grid.run_id`, Weights &
Biases and MLflow continue the previous worker's run.  The argument `own=` is for writers of each worker's own
metrics.  All workers also report their metrics to the group (`grid.report`).  The packages are imported at
the first write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gridtrain.extras import require

if TYPE_CHECKING:
    from gridtrain.sdk.grid import Grid


class Writer(Protocol):
    """An output of `Log`: `write` gets the metrics of one step, by name."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Log:
    """A logger that every worker calls with metrics; only the first worker passes them to `writers`.

    Values that are not finite are left out.  The writers also get the metric `sent_bytes`, the number of
    bytes that their worker has sent so far.

    Args:
        writers: the writers to which only the first worker passes its metrics.
        own: the writers to which every worker passes its metrics, such as a `TensorBoard` with a folder of
            this worker's own.
    """

    def __init__(self, grid: Grid, *writers: Writer, own: Sequence[Writer] = ()) -> None:
        self._grid, self._writers, self._own = grid, writers, tuple(own)

    def __call__(self, **figures: float) -> None:
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(float(value))}
        self._grid.report(**finite)
        sent_bytes = sum(sent for sent, _ in self._grid.traffic.values())
        for writer in (*self._own, *(self._writers if self._grid.is_first else ())):
            writer.write(self._grid.step, {**finite, "sent_bytes": float(sent_bytes)})

    def close(self) -> None:
        for writer in (*self._own, *self._writers):
            writer.close()


class TensorBoard:
    """Writes scalars to a folder for `tensorboard --logdir`; needs the `tensorboard` package."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: Any = None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._open is None:
            require("tensorboard", "gridtrain.adapters.loggers.TensorBoard")
            from torch.utils.tensorboard import SummaryWriter

            self._open = SummaryWriter(self._folder)
        for name, value in figures.items():
            self._open.add_scalar(name, value, step)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


class WeightsAndBiases:
    """Writes metrics to the run that `wandb.init(**options)` returns; needs the `wandb` package.

    Args:
        run: `grid.run_id`, so that workers that write one after the other write to the same run.
    """

    def __init__(self, *, run: str = "", **options: Any) -> None:
        self._options = {"id": run, "resume": "allow", **options} if run else options
        self._open: Any = None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._open is None:
            require("wandb", "gridtrain.adapters.loggers.WeightsAndBiases")
            import wandb

            self._open = wandb.init(**self._options)
        self._open.log(dict(figures), step=step)

    def close(self) -> None:
        if self._open is not None:
            self._open.finish()


class MLflow:
    """Writes metrics to a run of an MLflow experiment; needs the `mlflow` package.

    Args:
        experiment: the experiment's name; it is created if it does not exist.
        run: `grid.run_id`, so that workers that write one after the other write to the same run.
        tracking_uri: the server or database; by default MLFLOW_TRACKING_URI or MLflow's own default.
    """

    def __init__(self, experiment: str, *, run: str = "", tracking_uri: str | None = None) -> None:
        self._experiment, self._run, self._uri = experiment, run, tracking_uri
        self._client: Any = None
        self._run_id = ""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._client is None:
            require("mlflow", "gridtrain.adapters.loggers.MLflow")
            self._open()
        for name, value in figures.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def _open(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        )
        tags = {"gridtrain.run": self._run}
        query = f"tags.`gridtrain.run` = '{self._run}'"
        earlier = self._client.search_runs([experiment], query, max_results=1) if self._run else []
        run = earlier[0] if earlier else self._client.create_run(experiment, tags=tags if self._run else {})
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id)
