"""Collective operations as state machines that decide the senders, receivers and order of payloads.

`collective` is the interface to the I/O loop.  Dense sums are computed by `ring`, `direct` and `star`, sparse
sums by `allgather`, `direct`, `star`, and the gTop-k merges `butterfly` and `tree` (schedules that
`hop_exchange` executes).  A model in stages uses `activation_transfer` between stages, `direct_allgather`
among all members, and `subgroup` among the replicas of a stage.  The buffers in `gridtrain.runtime.buffers`
hold the values.
"""
