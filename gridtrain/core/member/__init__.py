"""A worker's state machine: `member` receives each event, `view_changes` follows the generations, `generation` is one of them.

What outlives a generation is in `context`: links to peers and to the coordinator, replica state, checkpoints,
catch-up, residual transfer, step pace.
"""
