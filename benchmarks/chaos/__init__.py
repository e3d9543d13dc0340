"""Runs of real processes under faults: kills, freezes, stalls, cut links and full disks."""
