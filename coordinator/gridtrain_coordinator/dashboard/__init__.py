"""The web page (dashboard) of a run, which the coordinator serves, by default only to its own machine.

    daemon's loop --publish(status)--> dashboard_service --> board --> http_api: page, API, /metrics, /healthz
      (never waits)  <---orders------  (its own thread)        |    \\
                                                            history  event_stream, for all open pages

Content: `topology_graph` and `prometheus` (metrics);
`sanitize` makes values from workers safe.  HTTP server: `startup`, `listen_address`, `guard` (checks each
request) and `connection_timeouts`.

This module imports nothing, so that the daemon can run without a dashboard if the extra `coordinator` is not
installed.
"""
