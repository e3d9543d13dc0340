"""The samples of a step: positions of the run -> samples of a data set -> batches.

sampler: positions to indices, the same on all workers;  readers: batches from a data set;  prefetch:
read ahead in other processes;  batch_sizes: checks of `Grid`'s arguments
"""
