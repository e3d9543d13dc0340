"""gridtrain in other people's training loops.

Decides nothing and imports nothing: each module here needs a package that may not be installed, and is
imported by name.

    adapters.ddp           gTop-k instead of all-reduce in torch's DistributedDataParallel
    adapters.hugging_face  transformers.Trainer as a worker of a run
    adapters.lightning     lightning.Trainer as a worker of a run
    adapters.loggers       figures to TensorBoard and Weights & Biases, from the first worker alone
    adapters.site          several processes of one place as one worker
    adapters.loader        batches for loops that want to call `iter` and `len` themselves
    adapters.mail          numbers and bytes between the processes of a torch.distributed group
"""
