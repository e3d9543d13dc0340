"""The simulator: the real cores of coordinator and members on a virtual network, thousands of histories a
minute.

    virtual_clock, virtual_network   time and messages, all drawn from one seed
    world, staged_world              coordinator, workers and their trainers on it; the same in stages
    process_restarts                 processes that end and come back with their key
    commit_coverage                  which commit rules a history has reached
    virtual_exchange                 the real collectives over the links of a network, for the cost model

A seed is a history.  The tests beside them check every guarantee over many of them.
"""
