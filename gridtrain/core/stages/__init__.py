"""Plans the training of a model in stages: its partition, schedule, placement on workers and step time.

Contains pure functions of costs and measurements, which the coordinator and `gridtrain plan` call.

    schedule               the order of each stage's forward and backward passes (fill-drain, 1F1B)
    stage_cost             seconds and bytes of a stage;  memory_fit: why no partition fits, and remedies
    bottleneck_partition   the search;  partition: the best partition for given devices
    step_time              a simulation of a whole step;  micro_batch_trials: the number of micro-batches
    device_assignment      unequal stages for unequal devices;  rank_placement: the rank of each worker
    repartition            a new partition for the remaining workers;  partition_chart: a partition as a chart
"""
