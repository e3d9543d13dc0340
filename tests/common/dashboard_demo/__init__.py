"""The dashboard with a simulated run: to look at, for screenshots, measurements and tests."""
