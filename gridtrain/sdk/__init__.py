"""What a user's script holds: `Grid` from `gridtrain.join()`, and a whole group in one process."""
