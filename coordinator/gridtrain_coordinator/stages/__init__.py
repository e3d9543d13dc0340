"""Placement and recovery of the stages of a partitioned model.  Pure."""
