"""Collective operations as state machines: who sends which payload to whom, and when.

`collective` is the interface to the loop.  Dense sums: `ring`, `direct`, `star`.  Sparse ones: `allgather`,
the gTop-k merges `butterfly` and `tree` (schedules that `hop_exchange` executes), `star`.  For models in
stages: `activation_transfer` between stages, `direct_allgather` among all members, and `subgroup` for the
replicas of a stage.  The numbers are in `gridtrain.runtime.buffers`.
"""
