"""What is fuzzed: one `Target` each, looked up by name in `registry`."""
