"""State on its way between peers: whole states, snapshots with update logs, checkpoints, residuals,
bundles."""
