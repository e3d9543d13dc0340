"""What survives a restart: the SQLite journal, its migrations and backups, and the mode for a full disk."""
