"""Ends a run on one worker: waits for the last checkpoint, and exports the final model, with retries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from gridtrain.config import JoinConfig
from gridtrain.core.messages import EXPORT_ATTEMPTS, MODEL_NOT_WRITTEN
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.quantities import describe_skipped, format_bytes
from gridtrain.runtime.client.worker_defaults import export_folder
from gridtrain.runtime.group_session import GroupSession
from gridtrain.training.model_state import ModelState

log = logging.getLogger("gridtrain")

FINAL_CHECKPOINT_TIMEOUT_S = 1800.0
"""The longest wait at the end of a run, in seconds, for each of these: the previous checkpoint, the last
step's checkpoint, and its upload."""

MAX_ATTEMPTS, ATTEMPT_INTERVAL_S, ATTEMPTS_PER_WARNING = 60, 10.0, 20
"""If the worker that exports the model could not write the last checkpoint or, without that checkpoint, the
final model, it tries again at most `MAX_ATTEMPTS` times, waits `ATTEMPT_INTERVAL_S` seconds before each
attempt, and logs an error before the first of every `ATTEMPTS_PER_WARNING` attempts."""

AwaitStop = Callable[[float], bool]
"""Waits for the given number of seconds; returns True, immediately, if this worker has to stop."""


def finish_run(
    session: GroupSession, model_state: ModelState, config: JoinConfig, await_stop: AwaitStop
) -> None:
    """Write the last checkpoint and wait for the other members; export the final model if that is this
    worker's task.

    Raises the error that prevented the checkpoint or the export, after everything else has been done.
    """
    if session.end_reason:
        _finish_as_standby(session, model_state)
        return
    exports = config.export_dir is not None and model_state.exports
    failed = None
    written = _try_final_checkpoint(model_state, 0.0)  # a slow disk does not delay the export
    if exports:
        failed = _try_export(session, model_state, config)
    if written is False:
        written = _try_final_checkpoint(model_state, FINAL_CHECKPOINT_TIMEOUT_S)
    if not session.wait_for_members():
        log.warning("this worker left before the coordinator had declared the run finished")
    if not exports and config.export_dir is not None:
        # The first worker may have been lost after the last step, before its export.
        with suppress(GridtrainError):  # the error that ended the session; the group's state is then unknown
            exports = model_state.exports
        if exports:
            failed = _try_export(session, model_state, config)
        else:
            log.warning("the run has finished; another worker is writing its model")
    ledger = session.snapshot.ledger
    if learned := describe_skipped(ledger.skipped, ledger.consumed):
        log.warning("%s; check the run's loss, learning rate and data", learned)
    if exports:
        failed, written = _repeat_writing(session, model_state, config, await_stop, failed, written)
    if not isinstance(written, Exception):
        model_state.finish_checkpoints(FINAL_CHECKPOINT_TIMEOUT_S)
    if isinstance(failed, ConfigError) and model_state.has_final_checkpoint and model_state.export_text:
        failed = ConfigError(failed.reason, remedy=f"{failed.remedy}; {model_state.export_text}")
    if isinstance(written, Exception):
        raise written
    if failed is not None:
        raise failed


def _finish_as_standby(session: GroupSession, model_state: ModelState) -> None:
    """End this worker without the others: log why the run has ended, and if this worker holds a stage, write
    it to a last checkpoint."""
    if not model_state.holds_stage:
        text = "%s; this worker does not hold the final model or a stage of it: its last step was %d"
        log.warning(text, session.end_reason, session.step)
        return
    log.warning("%s", session.end_reason)
    model_state.write_final_checkpoint(FINAL_CHECKPOINT_TIMEOUT_S)
    model_state.finish_checkpoints(FINAL_CHECKPOINT_TIMEOUT_S)


def _try_export(
    session: GroupSession, model_state: ModelState, config: JoinConfig, attempt: int = 1
) -> Exception | None:
    """Write the final model; return the error, if any, so that the caller can raise it after waiting for the
    members and the last checkpoint."""
    session.report_figures({EXPORT_ATTEMPTS: float(attempt)})
    try:
        model_state.export(export_folder(config.run, config.export_dir or ""))
    except Exception as error:
        # Without the path, because all members can read the text.
        reason = error.reason.rpartition(": ")[2] if isinstance(error, ConfigError) else type(error).__name__
        session.failure = f"{MODEL_NOT_WRITTEN}: {reason} (see its output)"
        return error
    session.failure = ""
    session.report_figures({EXPORT_ATTEMPTS: 0.0})
    return None


def _repeat_writing(
    session: GroupSession,
    model_state: ModelState,
    config: JoinConfig,
    await_stop: AwaitStop,
    failed: Exception | None,
    written: bool | Exception,
) -> tuple[Exception | None, bool | Exception]:
    """Try again to write the last checkpoint and, unless that is written, the final model.

    Stops after `MAX_ATTEMPTS` attempts, or when this worker must stop.

    Args:
        failed: the error that prevented the export, if any.
        written: the result of `_try_final_checkpoint`.

    Returns:
        The latest values of `failed` and `written`.
    """
    for attempt in range(MAX_ATTEMPTS):
        lacks_checkpoint = written is True and model_state.lacks_final_checkpoint(FINAL_CHECKPOINT_TIMEOUT_S)
        lacks_model = isinstance(failed, (ConfigError, OSError)) and not model_state.has_final_checkpoint
        if not (lacks_checkpoint or lacks_model):
            break
        if attempt % ATTEMPTS_PER_WARNING == 0:
            _warn_of_attempts(model_state, failed if lacks_model else None, MAX_ATTEMPTS - attempt)
        if await_stop(ATTEMPT_INTERVAL_S):
            break
        if lacks_model:
            failed = _try_export(session, model_state, config, attempt + 2)
        if lacks_checkpoint:
            written = _try_final_checkpoint(model_state, 0.0)
    return failed, written


def _warn_of_attempts(model_state: ModelState, failed: Exception | None, left: int) -> None:
    again = (ATTEMPT_INTERVAL_S, left * ATTEMPT_INTERVAL_S / 60)
    if failed is None:
        log.error(
            "the checkpoint of the last step is not on this worker's disk: this worker will try again "
            "every %g s, for %g minutes or until Ctrl-C",
            *again,
        )
        return
    log.error(
        "%s; the final model is not on this worker's disk; free %s on that disk, or make the folder "
        "writable: this worker will try again every %g s, for %g minutes or until Ctrl-C",
        failed.reason if isinstance(failed, ConfigError) else failed,
        format_bytes(model_state.export_bytes),
        *again,
    )


def _try_final_checkpoint(model_state: ModelState, timeout_s: float) -> bool | Exception:
    """Return the result of `write_final_checkpoint`, or its error (such as a changed base, or too little
    memory for a copy), which `finish_run` raises at its end."""
    try:
        return model_state.write_final_checkpoint(timeout_s)
    except Exception as error:
        return error
