"""The samples of a step: batch sizes, shuffling, reading, and sharded data sets with their cache.

sampler         maps positions to sample indices, in the same way on all workers
readers         read batches from a data set;  prefetch: reads them ahead in other processes
batch_sizes     the number of samples in a step

shards          data sets that are read file by file;  shard_index: the list of their files
shard_files     opens, checks and caches the files;  shard_fetch: copies them to this machine
fetch_meter     keeps fetches within the volunteer's limits
shard_formats   finds the samples in a file;  shard_tables: rows of tables;  token_packing: token sequences
"""
