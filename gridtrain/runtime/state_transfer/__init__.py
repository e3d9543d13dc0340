"""State on its way between workers.

- `blobs`, `state_sender`, `state_receiver`, `state_forwarder`: the state for members of a generation that
  forms, which waits for it; one source, forwarded in a chain.
- `state_snapshot`, `update_log`, `catch_up_source`, `catch_up_session`, `catch_up_receiver`: a snapshot and
  the updates since, for a worker that catches up while the members train; several sources.
- `checkpoint_requests`, `checkpoint_copy`: checkpoints of stages, on this worker's disk and between disks.
- `residuals`, `residual_pieces`: the residual of a worker that leaves.

The core decides who gives what to whom.  The training thread captures and loads states; the I/O thread sends
and receives blocks of 1 MiB, as far as the transport has room for them.
"""
