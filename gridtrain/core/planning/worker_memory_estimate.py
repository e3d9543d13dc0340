"""Predicts the memory that a worker needs, in bytes per trainable parameter, before anything is allocated.

    always                parameter, gradient, optimizer's state, flat gradient, residual, local steps,
                          update log
    during an exchange    the buffers of the exchange
    for a newcomer        a copy of the state, until the newcomer has received it
    for a checkpoint      a copy of the state and the residual, until they are written

Activations, frozen parameters, buffers of layers and the memory that kernels need while they run are not
included.  `tests/sdk/test_worker_memory_estimate.py` compares these figures with the memory of real workers.
`core.stages.stage_cost` predicts the memory of a stage, and `pipeline.memory_meters` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gridtrain.config import Dense, Exchange, LocalSteps
from gridtrain.core.planning.workload import INT8_BLOCK_ENTRIES, dense_payload_bytes

_FLOAT = 4
_ENTRY_BYTES = 12
"""Bytes of an entry (an index and a value) of a sparse vector in memory."""

_LOGGED_ENTRY_BYTES, _LOGGED_STEP_BYTES = 8, 800
"""Bytes of an entry in the update log, and bytes of a step in addition to those of its entries."""

MAX_LOGGED_STEPS, MAX_LOGGED_BYTES = 512, 128 << 20
"""The maximum length of the update log, in steps and in bytes."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Bytes per trainable parameter.

    Attributes:
        parameter, gradient, optimizer: the memory that training needs even without gridtrain.
        flat_gradient: the flat gradient, always float32.
        residual: the residual and its momentum, each with the copy that an exchange writes.
        local_steps: the parameters after the last exchange, the outer velocity and, with overlap, the change
            that is being exchanged.
        update_log: the updates of the latest steps.
        exchange: the buffers of an exchange, while it runs.
        state: a copy of the state, kept until a newcomer has received it.
        checkpoint: a copy of the parameters, the optimizer's state, the outer velocity and the residual, kept
            until a checkpoint is written.
    """

    parameter: float
    gradient: float
    optimizer: float
    flat_gradient: float
    residual: float
    local_steps: float
    update_log: float
    exchange: float
    state: float
    checkpoint: float

    @property
    def always(self) -> float:
        """Bytes per trainable parameter that a worker holds between two exchanges."""
        return self.total - self.exchange - self.state - self.checkpoint

    def __str__(self) -> str:
        values = [(each.name.replace("_", " "), getattr(self, each.name)) for each in fields(self)]
        return ", ".join(f"{name} {value:.3g}" for name, value in values if value)

    @property
    def total(self) -> float:
        return float(sum(getattr(self, each.name) for each in fields(self)))


def estimate_worker_memory(
    wire: Exchange,
    *,
    parameters: int,
    workers: int,
    optimizer_values: float,
    parameter_bytes: float = _FLOAT,
    local: LocalSteps | None = None,
    logged_steps: int = MAX_LOGGED_STEPS,
) -> WorkerMemory:
    """Return the bytes that a worker of this run holds per trainable parameter.

    Args:
        wire: the exchange; for local steps, the exchange inside `LocalSteps`.
        parameters: the number of trainable parameters.
        workers: the number of workers.
        optimizer_values: the number of values that the optimizer keeps for each parameter, such as 2 for
            AdamW (`stage_cost.OPTIMIZER_STATE_COPIES`).
        parameter_bytes: the bytes of a parameter, and of each of the optimizer's values.
        local: the local steps, if the change of the parameters is exchanged instead of the gradient; None
            otherwise.
        logged_steps: the maximum number of steps in the update log.
    """
    velocity = _FLOAT if local is not None and local.outer_momentum else 0.0
    own = 0.0 if local is None else parameter_bytes + velocity + _FLOAT * bool(local.overlap)
    moments = optimizer_values * parameter_bytes
    residual = log = 0.0
    if isinstance(wire, Dense):
        buffers = 1.0 * _FLOAT  # the sum
        if wire.values != "fp32":  # also the residual as it was sent, the rounding errors and the sent values
            residual = 2.0 * _FLOAT
            buffers += residual + dense_payload_bytes(INT8_BLOCK_ENTRIES, wire.values) / INT8_BLOCK_ENTRIES
    else:
        copies = 4.0 if wire.momentum else 2.0
        residual = copies * _FLOAT
        share = wire.k_at(10**9, parameters) / parameters
        summed = min(1.0, share * workers if wire.topology == "all-gather" else share)
        buffers = 2.0 * _ENTRY_BYTES * summed
        step_bytes = _LOGGED_STEP_BYTES + _LOGGED_ENTRY_BYTES * summed * parameters
        log = min(logged_steps * step_bytes, MAX_LOGGED_BYTES) / parameters
    return WorkerMemory(
        parameter=parameter_bytes,
        gradient=parameter_bytes,
        optimizer=moments,
        flat_gradient=_FLOAT,
        residual=residual,
        local_steps=own,
        update_log=log,
        exchange=buffers,
        state=parameter_bytes + (velocity if local is not None else moments),
        checkpoint=parameter_bytes + velocity + moments + residual / 2,
    )
