"""Collective operations as state machines: `collective` is the interface, each other module one algorithm."""
