"""Measures the links between this worker and its peers.

- `link_probe`: one measurement, which consists of the two below.
- `round_trip_probe`: the round-trip time to each peer.
- `bandwidth_probe`: the rates to a few peers, measured with a burst to one peer at a time.
"""
