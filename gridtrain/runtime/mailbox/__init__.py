"""What the training thread and the I/O thread share.

- `mailbox`: events and calls for the I/O thread, in order; the lock; waking of either thread.
- `worker_snapshot`: what the training thread may know of the run, replaced as a whole by the I/O thread.
- `worker_task`: what the training thread is to do for the group.

The I/O thread computes the snapshot, with the tasks in it, from the state of its parts after everything that
may have changed it.  The training thread waits for a snapshot, does the first task in it, and says so.
"""
