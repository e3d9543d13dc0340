"""What people would use instead, measured beside us in the same run.

Each rival is one module, started once for each rank, in an environment of its own; `contract.py` says how it
is asked and what it answers, `environments.py` what it needs.  Nothing here is imported by the product.

    contract.py      the command line, the result file: standard library only
    environments.py  available(), command(), setup()
    measure.py       barrier, operation, clock: the same for all
    entries.py       sparse gradients and their merge
    rendezvous.py    how the ranks find each other where a rival has no way of its own
    gloo.py  mpi.py  hivemind.py      the rivals; mpi_job.py, mpi_agent.py: parts of mpi
    train.py         a whole training run with gloo, PowerSGD or hivemind, for time to accuracy
    hosts.py         a group of ranks on the lab's hosts
    python -m rivals setup [NAME...] | list | run NAME --op OP --world 4 --rate 100Mbit --n 2.56e6
    python -m rivals train NAME --world 4 --rate 20Mbit --folder FOLDER -- --until-loss 2.5
"""

from rivals.contract import NAMES, OPS, TRAINERS, Combined, ContractError, Request, Result, combine
from rivals.environments import available, command, setup, train_command

__all__ = [
    "NAMES",
    "OPS",
    "TRAINERS",
    "Combined",
    "ContractError",
    "Request",
    "Result",
    "available",
    "combine",
    "command",
    "setup",
    "train_command",
]
