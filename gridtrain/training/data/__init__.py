"""The samples of a step, from positions in the run to samples of a data set to batches.

sampler: positions to indices, the same on all workers;  readers: batches from a data set;  prefetch:
read ahead in other processes;  batch_sizes: how many samples a step has

shards: data sets that are read file by file, from shard_index: their files;  shard_files: opening, checking
and keeping them;  shard_fetch: copying them from elsewhere;  fetch_meter: the volunteer's limits of that;
shard_formats: the samples in a file;  shard_rows: those of tables;  token_packing: sequences of tokens
"""
