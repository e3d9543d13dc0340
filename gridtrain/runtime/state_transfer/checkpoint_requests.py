"""Keeps the core's requests to save, load and discard stage checkpoints until the trainer carries them out.

    ev.SaveCheckpoint, ev.LoadCheckpoints, ev.DiscardCheckpoints --> task --> trainer --> finish

The training thread saves and loads checkpoints; the I/O thread copies them to and from other workers
(`checkpoint_copy`).
"""

from __future__ import annotations

from gridtrain.core.group import member_events as ev
from gridtrain.runtime.mailbox.mailbox import Mailbox

DiskTask = ev.SaveCheckpoint | ev.LoadCheckpoints | ev.DiscardCheckpoints


class CheckpointRequests:
    """Keeps the latest request of each kind until it is carried out."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._pending: dict[type[DiskTask], DiskTask] = {}

    # -- training thread -------------------------------------------------------------------------

    def finish(self, task: DiskTask) -> None:
        """Remove a request that the trainer has carried out or cannot carry out.

        If a newer request of the same kind has replaced it, the newer request is kept.
        """

        def drop() -> None:
            if self._pending.get(type(task)) == task:
                del self._pending[type(task)]

        self._mailbox.submit(drop)

    # -- I/O thread ------------------------------------------------------------------------------

    def add(self, request: DiskTask) -> None:
        self._pending[type(request)] = request

    def task(self, kind: type[DiskTask]) -> DiskTask | None:
        """Return the pending request of this kind, or None."""
        return self._pending.get(kind)

    def load_task(self, term: int, generation: int, *, synced: bool) -> DiskTask | None:
        """Return the pending request to load checkpoints, or None.

        The request is dropped if it belongs to another generation, or if this worker already holds the state.
        """
        task = self._pending.get(ev.LoadCheckpoints)
        if isinstance(task, ev.LoadCheckpoints) and (
            synced or (task.term, task.generation) != (term, generation)
        ):
            del self._pending[ev.LoadCheckpoints]
            return None
        return task
