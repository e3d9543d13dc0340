"""Plans the training of a model in stages: its partition, schedule, placement on workers and step time.

The package contains pure functions of costs and measurements; the coordinator and `gridtrain plan` call them.

    schedule               the order of each stage's forward and backward passes (fill-drain, 1F1B)
    stage_cost             the time and memory of a stage on a device
    partition              the best partition of a model for given devices
    bottleneck_partition   the search for a partition that minimizes the highest stage cost
    memory_fit             the reason why no partition fits into memory, and remedies
    step_time              a simulation of a whole step, and the best number of micro-batches
    micro_batch_trials     the number of micro-batches according to trials in a run's first steps
    device_assignment      unequal stages for unequal devices
    rank_placement         the rank of each worker
    repartition            a new partition when the number of workers changes
    partition_chart        a partition as a chart
"""
