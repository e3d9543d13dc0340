"""Connects gridtrain to the training loops, data sets and loggers of other packages.

Each module depends on a package that may not be installed, so it must be imported explicitly:

    adapters.ddp           gTop-k instead of all-reduce in torch's DistributedDataParallel
    adapters.hugging_face  transformers.Trainer as a worker of a run; adapters.trl: trl.SFTTrainer
    adapters.datasets      streams of the `datasets` package, read shard by shard
    adapters.lightning     lightning.Trainer as a worker of a run
    adapters.decoder       language models from transformers as chains of blocks, for pipelines
    adapters.loggers       writes metrics to TensorBoard, Weights & Biases and MLflow
    adapters.site          several processes at one site as one worker
    adapters.loader        batches for loops that call `iter` and `len` themselves
    adapters.gloo_channel  messages between the processes of a torch.distributed group

The modules for training loops, except `ddp`, pass the optimizer and the batches of a `Grid` to the loop, with
the interfaces that the loop expects.
"""
