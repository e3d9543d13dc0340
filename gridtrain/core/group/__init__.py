"""Definitions shared by the worker and the coordinator: invitation, ranks, flags, events and sensor readings.

`rank_layout` assigns ranks to stages and replicas, `member_events` defines the events and effects of a
worker's state machine, `round_flags` the flags of a round, `invitation` the text that admits a volunteer, and
`sensor_readings` the sensor values of a worker's machine.  `io_loop_stalls` detects that a process's own I/O
loop has stalled.
"""
