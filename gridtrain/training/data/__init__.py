"""Which samples a worker reads: sampler, readers of data sets, prefetching, batch sizes."""
