"""A worker's state machine.

`member` receives each event, `view_changes` follows the generations and routes messages, `generation_entry`
makes a `generation` of a VIEW.  In a generation, `required_peers` are the connections it needs,
`incoming_state` and `state_forwarding` bring the state to joining members, and `scalar_means` computes
averages for people.

What outlives a generation is in `context`: `coordinator_link`, `peer_links`, `replica_state`,
`member_checkpoints`, `worker_catch_up`, `residual_transfer` and `step_pace`.
"""
