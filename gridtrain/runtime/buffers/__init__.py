"""The numbers of a collective: numpy buffers that carry out what the cores of `core.collectives` decide."""
