"""The coordinator daemon: membership, generations, journal.  Never imports torch."""
