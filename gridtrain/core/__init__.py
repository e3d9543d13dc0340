"""The pure core, which makes all decisions without sockets, threads, clocks, arrays or tensors.

Time and randomness are arguments, and payloads are opaque tokens.  The same code therefore runs
over ZeroMQ, in memory, and in the tests' simulator.

    messages/      the messages between programs, as frozen dataclasses
    collectives/   all-reduce and all-gather as state machines, one for each algorithm
    commit/        the commit of a step on all members or on none; the assignment of samples to steps
    group/         definitions that worker and coordinator share
    member/        a worker's state machine, from generation to generation
    planning/      network and cost models, rank order, choice of an exchange
    stages/        pipeline schedules, partition and repartition of a model
"""
