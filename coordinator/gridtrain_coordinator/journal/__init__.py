"""The coordinator's state that survives a restart (journal, keys, backups), and its mode for a full disk.

store            the SQLite journal, with migrations/
keys             the key files beside it
backups          copies of the journal and the keys, and starting from a copy
disk_full_mode   the coordinator's behaviour while nothing can be written
"""
