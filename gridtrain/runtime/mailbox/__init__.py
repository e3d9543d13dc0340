"""The objects that the training thread and the I/O thread share.

- `mailbox`: passes events and calls to the I/O thread in order, holds the lock, and wakes either thread.
- `worker_snapshot`: the training thread's view of the run, which the I/O thread replaces as a whole.
- `step_plan`: the plan and the outcome of an attempt at a step.
- `worker_task`: the tasks that the training thread performs for the group.

Whenever the state of the core or of a part of the I/O loop may have changed, the I/O thread computes a new
snapshot, including its tasks.  The training thread waits for a snapshot, performs the first task in the
snapshot, and reports that the task is done.
"""
