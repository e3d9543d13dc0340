"""The samples of a step, from positions in the run to samples of a data set to batches.

sampler: positions to indices, the same on all workers;  readers: batches from a data set;  prefetch:
read ahead in other processes;  batch_sizes: checks of `Grid`'s arguments
"""
