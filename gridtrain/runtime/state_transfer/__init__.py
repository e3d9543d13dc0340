"""Transfers state between workers: whole states (while members wait or train), checkpoints and residuals.

- `block_buffer`: divides a state into blocks, and stores received blocks in memory.
- `blobs`, `state_sender`, `state_receiver`, `state_forwarder`: transfer the state to members of a forming
  generation, which waits for it.  One source sends the state, and each member forwards it to the next.
- `state_snapshot`, `update_log`, `catch_up_source`, `catch_up_session`, `catch_up_receiver`: transfer a
  snapshot and the later updates from several sources to a worker that catches up while the members train.
- `checkpoint_requests`, `checkpoint_copy`: save and load checkpoints of stages, and copy them between disks.
- `residual_mailbox`, `residual_pieces`: transfer the residual of a worker that leaves.

The core decides which worker sends which data to which worker.  The training thread captures and loads
states.  The I/O thread receives blocks, and sends blocks of 1 MiB as long as the transport's queue has room.
"""
