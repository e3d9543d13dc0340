"""What the coordinator knows of the run: registered workers, addresses, links, plans.  Pure."""
