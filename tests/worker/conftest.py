"""A coordinator on the loopback interface for every module; a state folder for every test."""

from live_coordinator import coordinator, invitation, state

__all__ = ["coordinator", "invitation", "state"]
