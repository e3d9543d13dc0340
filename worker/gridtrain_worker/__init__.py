"""The worker agent: supervises a training process on a volunteer's machine."""
