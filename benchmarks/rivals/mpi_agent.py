"""Started by mpirun instead of ssh: passes the command for a host to the launcher, which runs it there.

python -m rivals.mpi_agent SOCKET HOST COMMAND...
"""

from __future__ import annotations

import json
import socket
import sys


def agent() -> None:
    """Pass the command on; end with an error if the launcher does not accept it."""
    path, host, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rwb") as launcher:
            launcher.write(json.dumps([host, " ".join(command)]).encode() + b"\n")
            launcher.flush()
            if launcher.readline() != b"\n":
                sys.exit(f"the launcher did not accept the command for {host}")


if __name__ == "__main__":
    agent()
