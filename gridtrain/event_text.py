"""Describes events (joined, lost, ...) to a run's owner in sentences; docs/cli.md lists the events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridtrain.quantities import format_count, format_fields

SENTENCES = {
    "backup": "backups are being written again: {reason}",
    "backup_failed": "a backup failed: {reason}; {remedy}",
    "called_back": "other workers {can} connect to {name}",
    "caught_up": "{name} has received the state up to step {step}",
    "checkup": "`gridtrain doctor` connected from {from}",
    "checkpoint_failed": "{name} could not write a checkpoint in {failed}: {remedy}",
    "checkpoint_ignored": "{name} has a checkpoint of step {step}, but the run had reached step {reached}",
    "checkpoint_written": "{name} is writing checkpoints again",
    "checkpoint_uploaded": "{name} is uploading checkpoints again",
    "dashboard_failed": "an error in the dashboard: {reason}",
    "compacted": "the journal was compacted: {entries} entries with {MB} MB were removed",
    "denied": "the key {peer} has no access",
    "drifted": "the state of {name} differs from the others' at step {step}",
    "enrolled": "an invitation admitted the key {peer}",
    "exchange_unknown": "this coordinator does not know the exchange {exchange}, so ranks are ordered by "
    "round trips only; use a coordinator of the workers' version",
    "finished": "the run has finished: {reason}",
    "following": "the state is being sent to {names} while the others keep training",
    "freeze": "the members are waiting for a new generation: {reason}",
    "generation": "generation {generation} has {workers} and begins at step {step}: {reason}",
    "joined": "{name} has joined",
    "journal_missing": "{reason}; {remedy}",
    "learning_again": "{reason}",
    "left": "{name} has left: {reason}",
    "lone_mean": "{name} called grid.mean without other workers near step {step}: {remedy}",
    "links_remeasured": "the members measure their links again: an exchange now takes {measured_s} s; the "
    "prediction is {predicted_s} s",
    "loop_stalled": "the coordinator did not run for {late_s} s",
    "lost": "{name} is lost: {reason}",
    "model_not_written": "{name} could not write the final model: {reason}; {remedy}",
    "not_compacted": "the journal was not compacted: {reason}",
    "no_route": "{name} cannot connect to {to}",
    "no_room": "the disk is full: {reason}; {remedy}",
    "no_such_piece": "{name} no longer has its checkpoint",
    "not_learning": "{reason}",
    "not_enrolled": "an invitation was refused: {reason}",
    "not_following": "{name} is not receiving the state: {reason}",
    "paused": "the run is paused: {reason}",
    "readmitted": "the key {peer} has access again: {reason}",
    "recalled": "members reported generation {generation} of {workers}, which the journal does not contain",
    "refused": "{name} was refused: {reason}",
    "renamed": "{name} asked for the name {asked}: {reason}",
    "removed": "{name} {reason}",
    "restored": "the run continues from the checkpoints of step {step}; any later steps are lost",
    "rollback": "steps are lost: the run returns from step {from} to step {to}",
    "room_again": "there is space on the disk again, after {after_s} s",
    "run_defined": "the first worker has defined the model, the data and the optimizer",
    "source_replaced": "no state has reached {names} from {source}, so another member is sending it",
    "stalled": "{name} reports no progress at step {step}: {reason}",
    "started": "the coordinator has started",
    "step_missed": "{name} was too late for {missed}, the latest near step {step}",
    "step_skipped": "{name} had unusable gradients in {skipped}, the latest near step {step}: {reason}",
    "superseded": "{name} has switched to a coordinator that started later",
    "training": "training continues with {workers} from step {step}",
    "upload_failed": "{name} could not upload a checkpoint in {failed}: {remedy}",
    "violation": "{peer} broke the protocol: {reason}",
    "waiting": "the run is waiting for workers: {reason}",
    "worker_finished": "{name} has reached the end of the run",
}
FIRST_STEP = "training starts with {workers}"
COUNTED = ("workers", "worker"), ("skipped", "step"), ("missed", "step"), ("failed", "attempt")


class _Fields(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "?"


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event as a sentence, or its name and fields if this version does not know it."""
    fields = format_fields({name: value for name, value in event.items() if name not in ("at_s", "event")})
    kind = str(event.get("event", "?"))
    if kind in SENTENCES:
        for field, noun in COUNTED:
            if isinstance(count := event.get(field), int):
                fields[field] = format_count(count, noun)
        if event.get("at_least"):
            fields["from"] = f"{fields.get('from', '?')} or later"
        can = "can" if event.get("reachable") else "cannot"
        sentence = FIRST_STEP if kind == "training" and event.get("step") == 0 else SENTENCES[kind]
        return sentence.format_map(_Fields(fields, can=can))
    return " ".join([kind.replace("_", " "), *(f"{name}={text}" for name, text in fields.items())])
