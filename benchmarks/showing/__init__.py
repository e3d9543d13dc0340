"""A run that nobody trains, for the dashboard: to look at it, to take pictures, to measure and to test it."""
