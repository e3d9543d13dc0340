"""The coordinator's state machine: who is a member, how one generation follows another.  Pure."""
