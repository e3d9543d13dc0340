"""Other systems for the exchange of gradients, measured beside gridtrain.

Each rival is a module that is started once for each rank, in its own environment.

    contract.py         the argument and the result file of a rank; imports only the standard library
    environments.py     what each rival needs, and its installation (`make rivals`)
    measure.py          barrier, operation and clock, the same for all
    sparse_gradient.py  the gradient of a sparse exchange, and its published merge
    rendezvous.py       barriers and values between the ranks of hivemind
    gloo.py  mpi.py  hivemind.py      the rivals
    train.py            a training run with gloo, PowerSGD or hivemind, for time to accuracy
    straggler.py        a worker of hivemind in `stragglers.py`
    hosts.py            a group of ranks on the lab's hosts
"""
