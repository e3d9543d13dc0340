"""A worker's runtime: the I/O loop, and the rounds, state transfers and measurements that it carries out.

A worker has two threads.  The training thread runs the user's script; the I/O thread owns the transport and
the member core (`gridtrain.core.member`).

    training thread                                           I/O thread
      GroupSession  -- events, calls -->  Mailbox  -->  IoLoop -- events --> MemberCore
          ^                                                 |                    |
          +-------- WorkerSnapshot (immutable) <------------+ <---- effects -----+

- `group_session`, `trainer_tasks`: the interface for the training thread, and the tasks that the thread
  performs while it waits.
- `group_connection`: owns the I/O loop, and makes a new I/O loop after each pause.
- `group_means`: computes means of numbers over the members.
- `mailbox/`: the only objects that both threads share; `snapshot_builder` makes the snapshots.
- `io_loop`: passes events to the core, and executes the core's effects with the modules below and the
  transport.
- `step_rounds`, `open_round`, `missed_step`, `buffers/`, `activation_buffers`: the rounds in which this
  worker takes part, the steps that its trainer has missed, and the data that rounds exchange.
- `state_transfer/`: sends and receives model state, snapshots, updates, checkpoints and residuals.
- `heartbeat`, `link_probes/`, `compute_rate`, `contribution`: measure this worker's progress, network, speed
  and contribution.
- `reconnect_policy`, `process_hooks`, `event_log`: decide when a worker gives up, how a script ends, and
  which messages are logged for the core's events.
- `free_memory`: determines how much memory is free on this host.
- `client/`: communicates with a coordinator without being a member of its run.
"""
