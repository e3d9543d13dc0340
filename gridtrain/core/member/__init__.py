"""A worker's state machine: its generation, connections, state, catch-up, stragglers and residual.

`member` receives all events, `view_changes` follows the generations and routes messages, and
`generation_entry` creates a `generation` from a MembershipView.  Within a generation, `required_peers`
determines the connections that the member needs, `incoming_state` and `state_forwarding` transfer the state
to joining members, `scalar_means` computes averages and weights for scripts, and `stragglers` decides when a
step continues without a member whose trainer has stalled.

`context` holds the objects that outlive a generation: `coordinator_link`, `peer_links`, `replica_state`,
`member_checkpoints`, `worker_catch_up`, `residual_recipients` and `step_pace`.
"""
