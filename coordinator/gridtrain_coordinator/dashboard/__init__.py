"""The page on which people watch a run: served by the coordinator, for its own machine by default.

Nothing is imported here: without the extra `coordinator` the daemon runs as before.

    daemon's loop --show(picture)--> service.py --> board.py --> app.py: the API, /metrics, /healthz, the page
      (never waits)  <---orders----  (own thread)    |    \\
                                                history.py  live.py: one event a second, encoded once for all
"""
