"""The pure core: all decisions, without sockets, threads, clocks, arrays or tensors.

Time and randomness are arguments, payloads are opaque tokens.  So the same code runs over ZeroMQ, in memory,
and in the simulator of the tests.

    messages/      what travels between programs, as frozen dataclasses
    collectives/   all-reduce and all-gather as state machines, one for each algorithm
    commit/        a step commits on all members or on none; which sample belongs to which step
    group/         what worker and coordinator both say of a group
    member/        a worker's state machine: the generations it lives through
    planning/      network and cost model, rank order, choice of an exchange
    stages/        pipeline schedules, partition and repartition of a model
"""
