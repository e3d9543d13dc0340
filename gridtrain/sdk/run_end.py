"""The end of a run on one worker: the last checkpoint, and the final model in the export folder."""

from __future__ import annotations

import logging
from contextlib import suppress

from gridtrain.config import JoinConfig
from gridtrain.core.messages import MODEL_NOT_WRITTEN
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.quantities import describe_skipped
from gridtrain.runtime.client.worker_defaults import export_folder
from gridtrain.runtime.group_session import GroupSession
from gridtrain.training.model_state import ModelState

log = logging.getLogger("gridtrain")

FINAL_CHECKPOINT_TIMEOUT_S = 1800.0
"""How many seconds the end of a run waits for the previous checkpoint, for that of the last step, and for its
upload, each."""


def finish_run(session: GroupSession, model_state: ModelState, config: JoinConfig) -> None:
    """Write the last checkpoint and, if this worker exports it, the final model; wait for the other
    members."""
    if session.end_reason:
        _finish_as_standby(session, model_state)
        return
    exports = model_state.exports
    failed = None
    written = _try_final_checkpoint(model_state, 0.0)  # a slow disk does not delay the export
    if exports:
        failed = _try_export(session, model_state, config)
    if written is False:
        written = _try_final_checkpoint(model_state, FINAL_CHECKPOINT_TIMEOUT_S)
    if not session.wait_for_members():
        log.warning("this worker left before the coordinator had declared the run finished")
    if not exports:
        # The first worker may have been lost after the last step, before its export.
        with suppress(GridtrainError):  # the error that ended the session; the group's state is then unknown
            exports = model_state.exports
        if exports:
            failed = _try_export(session, model_state, config)
        else:
            log.warning("the run is finished; another worker writes its model")
    ledger = session.snapshot.ledger
    if learned := describe_skipped(ledger.skipped, ledger.consumed):
        log.warning("%s; check the run's loss, learning rate and data", learned)
    if isinstance(written, Exception):
        raise written
    model_state.finish_checkpoints(FINAL_CHECKPOINT_TIMEOUT_S)
    if failed is not None:
        raise failed


def _finish_as_standby(session: GroupSession, model_state: ModelState) -> None:
    """End without the other workers; if the run was ended because a stage is missing, save this worker's."""
    if not model_state.holds_stage:
        text = "%s; at the end this worker held neither the model nor a stage of it"
        log.warning(text, session.end_reason)
        return
    log.warning("%s", session.end_reason)
    model_state.write_final_checkpoint(FINAL_CHECKPOINT_TIMEOUT_S)
    model_state.finish_checkpoints(FINAL_CHECKPOINT_TIMEOUT_S)


def _try_export(session: GroupSession, model_state: ModelState, config: JoinConfig) -> Exception | None:
    """Write the final model; return the error, which is to be raised at the very end: the members and the
    last checkpoint come first."""
    try:
        model_state.export(export_folder(config.run, config.export_dir))
    except Exception as error:
        # Without the path, because all members can read the text.
        reason = error.reason.rpartition(": ")[2] if isinstance(error, ConfigError) else type(error).__name__
        session.failure = f"{MODEL_NOT_WRITTEN}: {reason} (see its output)"
        return error
    return None


def _try_final_checkpoint(model_state: ModelState, timeout_s: float) -> bool | Exception:
    """Return the result of `write_final_checkpoint`, or its error, such as a changed base or too little
    memory for a copy, which is to be raised at the very end."""
    try:
        return model_state.write_final_checkpoint(timeout_s)
    except Exception as error:
        return error
