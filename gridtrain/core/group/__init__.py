"""What worker and coordinator both say of a group.

`rank_layout` places ranks in stages and replicas, `member_events` are the events and effects of a worker's
core, `invitation` is the text that admits a volunteer, `stall_detection` finds out that our own loop stood
still, and `sensor_readings` are what a volunteer's machine reports about itself.
"""
