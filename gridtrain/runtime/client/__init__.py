"""Talking to a coordinator from outside a run: enrolment, operator commands, the agent beside a script."""
