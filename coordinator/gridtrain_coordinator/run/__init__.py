"""What the coordinator knows of the run.  Pure: no sockets, threads, clocks or tensors.

run_state          the shared state: registered workers, members, phase, with
                   registry, view_change, stage_bounds
events             what `Membership` takes and returns
generation_plan    measurements of workers and links --> rank order, exchange, shares; with
                   link_reports (which reports count), link_failures (connections that break)
addressing         how workers reach each other; route_table chooses the routes
divergence         compares the digests of the members' states
journal_recovery   the run as the journal left it
worker_names, paused_workers
"""
