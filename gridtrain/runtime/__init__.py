"""The runtime of a worker: the I/O loop and everything that it drives.

A worker has two threads.  The training thread runs the user's script; the I/O thread owns the transport and
the member core (`gridtrain.core.member`).

    training thread                                           I/O thread
      GroupSession  -- events, calls -->  Mailbox  -->  IoLoop -- events --> MemberCore
          ^                                                 |                    |
          +-------- WorkerSnapshot (immutable) <------------+ <---- effects -----+

- `group_session`, `trainer_tasks`: what the training thread calls, and the tasks that it does while it waits.
- `mailbox/`: the only thing that both threads share.
- `io_loop`: carries events to the core, and its effects to the parts below and to the transport.
- `step_rounds`, `open_round`, `buffers/`: the numbers of the rounds that this worker takes part in.
- `state_transfer/`: model state, snapshots, updates, checkpoints and residuals on their way between workers.
- `heartbeat`, `link_probe`, `compute_rate`, `contribution`: measurements.
- `client/`: talking to a coordinator from outside a run.
"""
