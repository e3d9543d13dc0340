"""Which exchange, in which order of ranks, with which shares of a batch, from measured links and speeds.

Pure functions of measurements, and the state of one run's choice; nothing here measures or sends.

    exchange_facts        the facts of a run --> Dense | TopK | GTopK | Auto, number of parameters
    network_model         links, latencies and rates;  workload: bytes and CPU time of an exchange
    message_schedule      an exchange as a list of messages that depend on each other
    exchange_simulation   their times on a network;  cost_model: what the whole exchange costs
    rank_order_search     the fastest order of ranks;  rank_order: from what workers report, with the reason
    exchange_comparison   the fastest exchange, ring or direct;  exchange_choice: what a run has chosen
    batch_shares          samples of a step for each worker;  local_steps_proposal: steps between exchanges
"""
