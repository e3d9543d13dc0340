"""The coordinator's decisions on members, without I/O: admission, removal and the next generation.

    event --> membership --> worker_admission, departures, catch_up, complaints      single workers
                        `--> freeze_phase --> view_installer --> readiness           view changes
                                         `--> pipeline_recovery                      pipelines
                        `--> member_recovery <-- generation_reports                  an outdated journal

`readiness` limits the wait for members that receive or load a state, and `state_sources` replaces a source
that does not send the state; `catch_up` chooses the sources for workers that catch up while members train.
`member_lists` builds a generation's member list for each recipient.

The records on which these decisions rely are kept in `gridtrain_coordinator.run`: `liveness` (when a worker
counts as lost), `link_failures` (which member is at fault), `paused_workers` and `worker_problems`.

All parts share `run.run_state.RunState`; each returns effects, which `Membership` passes on in order.
"""
