"""The batch sizes that a script requests: the arguments of `Grid.batches` (global_batch_size, accumulate).

batch_size=32, accumulate=2, 4 calls to optimizer.step in a step   --> Setup.batch_size = 256
global_batch_size=512, max_batch_size=64, 1 call in a step         --> Setup.global_batch_size = 512,
                                                                       Setup.batch_size = 64, an upper limit
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.errors import ConfigError

MAX_STEP_SAMPLES = 2**31 - 1
"""The maximum number of samples in a step, for one worker and for all workers together; a protocol limit."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The batch sizes that a script requests, either per worker or for all workers together.

    Attributes:
        per_worker, per_step, max_per_worker: the arguments `batch_size`, `global_batch_size` and
            `max_batch_size` of `Grid.batches`.
        accumulate: the number of a worker's batches per call to `optimizer.step`.
        calls_per_step: the number of calls to `optimizer.step` in a step of the run.
    """

    per_worker: int | None
    per_step: int | None
    max_per_worker: int | None = None
    accumulate: int = 1
    calls_per_step: int = 1

    @property
    def global_batch_size(self) -> int | None:
        """The value of `Setup.global_batch_size`."""
        return None if self.per_step is None else self.per_step * self.calls_per_step

    @property
    def batch_size(self) -> int:
        """The value of `Setup.batch_size`: the number of samples that this worker processes in a step, or an
        upper limit on it; 0 if there is no limit."""
        batch = self.per_worker if self.per_step is None else self.max_per_worker
        return (batch or 0) * self.accumulate * self.calls_per_step

    @property
    def is_one(self) -> bool:
        """Whether every batch on a worker has at most one sample, regardless of the number of workers."""
        return self.per_worker == 1 or (self.per_step is not None and self.per_step <= self.accumulate)

    def check(self) -> None:
        """Raise `ConfigError` if sizes contradict each other or are not positive, or if a step would have
        more than `MAX_STEP_SAMPLES` samples."""
        if (self.per_worker is None) == (self.per_step is None):
            raise ConfigError(
                f"batch_size={self.per_worker}, global_batch_size={self.per_step}; pass exactly one of them",
                remedy="pass batch_size=32 for 32 samples on each worker",
            )
        if self.max_per_worker is not None and self.per_step is None:
            raise ConfigError(
                f"max_batch_size={self.max_per_worker} was given without global_batch_size, "
                "so this worker's batch size is fixed",
                remedy="remove max_batch_size=",
            )
        named = {
            "batch_size": self.per_worker,
            "global_batch_size": self.per_step,
            "max_batch_size": self.max_per_worker,
        }
        for name, value in named.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be >= 1", remedy="try batch_size=32")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}; it must be >= 1", remedy="try accumulate=1")
        samples = max(self.batch_size, self.global_batch_size or 0)
        if samples > MAX_STEP_SAMPLES:
            raise ConfigError(
                f"a step would have {samples} samples; at most {MAX_STEP_SAMPLES} are possible",
                remedy="use smaller batches, or fewer of them in a step",
            )
