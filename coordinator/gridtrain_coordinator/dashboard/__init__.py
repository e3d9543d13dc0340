"""The web page (dashboard) of a run, which the coordinator serves, by default only to its own machine.

    daemon's loop --publish(status)--> dashboard_service --> board --> http_api: page, API, /metrics, /healthz
      (never waits)  <--commands-----  (its own thread)        |    \\
                                                            history  event_stream, for all open pages

`topology_graph` and `prometheus` build the graph and the metrics, and `sanitize` makes values from workers
safe.  The HTTP server consists of `startup`, `listen_address`, `guard`, which checks each request, and
`connection_timeouts`.

This module imports nothing, so that the daemon can run without a dashboard if the `coordinator` extra is not
installed.
"""
