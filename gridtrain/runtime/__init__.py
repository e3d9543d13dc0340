"""The loop that connects the pure cores to a transport, and what users hold: `Grid`."""
