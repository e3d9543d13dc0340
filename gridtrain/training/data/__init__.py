"""The samples of a step: batch sizes, shuffling, reading, and sharded data sets with their cache.

sampler: positions to indices, the same on all workers;  readers: batches from a data set;  prefetch:
read ahead in other processes;  batch_sizes: how many samples a step has

shards: data sets that are read file by file;  shard_index: the list of their files;  shard_files: opening,
checking and caching them;  shard_fetch: copying them to this machine;  fetch_meter: the volunteer's limits on
fetching;  shard_formats: the samples in a file;  shard_rows: rows of tables;  token_packing: token sequences
"""
