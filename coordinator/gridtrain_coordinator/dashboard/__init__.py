"""The page on which people watch a run: served by the coordinator, by default for its own machine only.

    daemon's loop --publish(status)--> dashboard_service --> board --> http_api: page, API, /metrics, /healthz
      (never waits)  <---orders------  (its own thread)        |    \\
                                                            history  event_stream, for all open pages

Nothing is imported here: without the extra `coordinator` the daemon runs without a dashboard.
"""
