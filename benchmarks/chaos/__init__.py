"""Chaos: real processes that are killed, frozen, cut off and starved, and what the run makes of it."""
