"""How one optimizer step becomes final on all members or on none (commit rules 1 to 6), and the data ledger.

`attempts` runs the attempts at one step, `two_phase_commit` the vote on each.  `verdict` settles a step that
a freeze interrupted (rule 6).  `data_ledger` assigns every sample to exactly one committed step, and
`ledger_record` is its form in the coordinator's journal and in checkpoints.
"""
