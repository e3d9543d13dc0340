"""The coordinator's record of the run, without I/O: workers, addresses, plans, names and problems.

run_state          the shared state: registered workers, members, phase, with
                   registry, liveness, view_change, stage_bounds
events             the events that `Membership` handles, and the effects that it returns
generation_plan    measurements of workers and links --> rank order, exchange, shares; with
                   reorder_limits (which reports count, and when they reorder ranks),
                   link_failures (connections that break),
                   link_remeasurement (when members measure their links again)
addressing         how workers reach each other; route_table chooses the routes
divergence         compares the digests of the members' states
journal_recovery   reads the run back from the journal
unique_names       names of workers, unique within the run
paused_workers     workers that their owners have paused
slow_member        the slow member for which the others wait
recent_dict        a dictionary of limited size
worker_problems    skipped steps, missed steps and failed checkpoints, as reported by workers
"""
