"""Chooses a run's exchange, its order of ranks and its batch shares from measured links and speeds.

Contains pure functions of measurements, and the state of a run's choice of exchange; it neither measures nor
sends.

    exchange_facts        the facts of a run --> Dense | TopK | GTopK | Auto, number of parameters
    network_model         links, latencies and rates;  workload: bytes and CPU time of an exchange
    message_schedule      an exchange as a list of messages that depend on each other
    exchange_simulation   the times of these messages on a network;  cost_model: the cost of an exchange
    rank_order_search     the fastest order of ranks;  rank_order: the order from workers' reports
    entry_shares          which members select fewer entries, because their uploads are slow
    exchange_comparison   the fastest exchange;  exchange_choice: the choice of a run
    topology_choice       whether an exchange is direct, or uses a ring or butterfly
    worker_memory         the memory of a worker, in bytes per trainable parameter
    batch_shares          each worker's samples of a step;  local_steps_proposal: steps between exchanges
    svg_elements          elements that several charts have in common
"""
