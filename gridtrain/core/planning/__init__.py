"""Which exchange, in which order of ranks, with which shares of a batch: from measured links and speeds.

`network_model` and `workload` describe, `message_schedule` lists an exchange's messages, `exchange_simulation` and
`cost_model` time them; `rank_order` and `exchange_choice` decide.
"""
