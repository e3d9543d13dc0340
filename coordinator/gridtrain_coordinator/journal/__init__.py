"""The state that survives a restart of the coordinator.

store            the SQLite journal, with migrations/
keys             the key files beside it
backups          copies of journal and keys, and how to start from a copy
disk_full_mode   behaviour of the coordinator while nothing can be written
"""
