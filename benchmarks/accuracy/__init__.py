"""Time to accuracy: the same training with each exchange and each rival, over the same links."""
