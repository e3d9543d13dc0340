"""What survives a restart of the coordinator.

store            the SQLite journal, with migrations/
keys             the key files beside it
backups          copies of journal and keys, and the start from one
disk_full_mode   the coordinator while nothing can be written
"""
