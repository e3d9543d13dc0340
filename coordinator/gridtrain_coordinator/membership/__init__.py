"""The coordinator's state machine: who is a member, and how one generation follows another.  Pure.

    event --> membership --> worker_admission, departures, catch_up, complaints      single workers
                        `--> freeze_phase --> view_installer --> readiness           view changes
                                         `--> pipeline_recovery                      pipelines
                        `--> member_recovery <-- generation_reports                  journal behind the run

All parts share `run.run_state.RunState`; each returns effects, which `Membership` passes on in their order.
"""
