"""A model in stages: its schedule, its partition into stages, which worker gets which, and what a step takes.

Pure functions of costs and measurements, which the coordinator and `gridtrain plan` call.

    schedule               the order of forwards and backwards of each stage (fill-drain, 1F1B)
    stage_cost             seconds and bytes of a stage;  memory_fit: why no partition fits, and what would
    bottleneck_partition   the search;  partition: layers into stages for given cards
    step_time              a whole step, simulated;  micro_batch_tuning: the number of micro-batches
    device_assignment      uneven stages for uneven cards;  rank_placement: which worker gets which rank
    repartition            another partition over the workers that are left;  partition_chart: text and SVG
"""
