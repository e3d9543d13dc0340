"""The targets: one `Target` each, looked up by name in `registry`."""
