"""Fault injection, for our tests and for users."""
