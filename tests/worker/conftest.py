"""A coordinator on the loopback interface and a state folder for every test."""

from live_coordinator import coordinator, invitation, state

__all__ = ["coordinator", "invitation", "state"]
