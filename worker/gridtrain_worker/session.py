"""What the agent knows of its own machine.

Decides what a worker is called and where it listens if nobody says.  Never reads the host's or the
user's name: they are personal.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from gridtrain.runtime.naming import random_name

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, under the name it goes by in the run.  `cpus`: those this process may use."""

    name: str
    cpus: int

    @classmethod
    def here(cls, name: str = "") -> Machine:
        affinity = getattr(os, "sched_getaffinity", None)
        cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return cls(name or random_name(), cpus)

    def gpus(self) -> int:
        """CUDA devices that torch sees, 0 without torch.  Imports torch, which takes a second."""
        if importlib.util.find_spec("torch") is None:
            return 0
        import torch

        return torch.cuda.device_count()


def listen_address(coordinator: str) -> str:
    """Where to wait for other workers: any free port of the interface that leads to the coordinator.

    Loopback if the coordinator is on this machine.  Nothing is sent to find out.
    """
    target = urlsplit(coordinator)
    host, port = target.hostname or LOOPBACK, target.port or 1
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            own = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except OSError:
        own = ipaddress.ip_address(LOOPBACK)
    return f"tcp://[{own}]:0" if own.version == 6 else f"tcp://{own}:0"
