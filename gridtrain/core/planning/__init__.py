"""Chooses a run's exchange, its order of ranks and its batch shares from measured links and speeds.

The package contains pure functions of measurements, and the state of a run's choice of exchange.  It neither
measures links nor sends messages.

    exchange_facts           the facts of a run --> Dense | TopK | GTopK | Auto, number of parameters
    network_model            latencies and rates of links
    workload                 messages, bytes and CPU time of an exchange
    message_schedule         an exchange as a list of messages that depend on each other
    exchange_simulation      the times of these messages on a network
    cost_model               the cost of an exchange in seconds, bytes and CPU time
    rank_order_search        the fastest order of ranks on a network
    rank_order               the order of ranks for the links that workers report
    entry_shares             which members send fewer entries, because their uploads are slow
    exchange_recommendation  the predicted step times of exchanges, and the best of them
    exchange_choice          the coordinator's choice during a run, which changes with links and speeds
    topology_choice          whether an exchange is direct, or uses a ring or butterfly
    worker_memory_estimate   the memory of a worker, in bytes per trainable parameter
    batch_shares             each worker's share of a step's samples
    local_steps_proposal     the number of local steps between two exchanges, and advice to use them
    svg_elements             elements that several charts have in common
"""
