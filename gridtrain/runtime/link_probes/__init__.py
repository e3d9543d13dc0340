"""Measures the links between this worker and its peers.

- `link_probe`: one measurement: the round-trip time to each peer, and then the rates.
- `bandwidth_probe`: the rates to a few peers, measured with a burst to one peer at a time.
"""
