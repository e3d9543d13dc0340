"""Time to accuracy: the same training with every exchange and every rival, on the same lines."""
