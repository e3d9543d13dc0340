"""gridtrain in the training loops of other packages.

Each module needs a package that may not be installed, and is imported by name:

    adapters.ddp           gTop-k instead of all-reduce in torch's DistributedDataParallel
    adapters.hugging_face  transformers.Trainer as a worker of a run
    adapters.lightning     lightning.Trainer as a worker of a run
    adapters.loggers       figures to TensorBoard and Weights & Biases, from the first worker alone
    adapters.site          several processes of one place as one worker
    adapters.loader        batches for loops that call `iter` and `len` themselves
    adapters.gloo_channel  numbers and bytes between the processes of a torch.distributed group

A loop asks its adapter for optimizer and batches; the adapter gets them from a `Grid` and adapts their
interface.
"""
