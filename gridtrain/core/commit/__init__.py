"""Commits an optimizer step on all members or on none (commit rules 1 to 6), and keeps the data ledger.

`attempts` runs the attempts at each step, and `two_phase_commit` the vote on each attempt.  `verdict` decides
whether a step that a Freeze interrupted is committed (rule 6).  `data_ledger` assigns every sample to exactly
one committed step, with the operations of `spans`; `shard_leases` confines each member to a few shards of the
data, and `ledger_record` converts the ledger to JSON for the coordinator's journal and for checkpoints.
"""
