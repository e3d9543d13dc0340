"""Connections between the ranks of a group that send lines of JSON; imports only the standard library.

    rank 0 listens at the master's address and port; the others dial it until it listens
    exchange(value):  send all ranks' values, by rank, to all ranks, which is a barrier, too
    send, receive:    between rank 0 and another rank

There is no access control, so it must be used only in a lab or on loopback.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, closing
from io import BufferedRWPair
from typing import Any

from rivals.contract import Rank

UP_S = 120.0
ANSWER_S = 1800.0
AGAIN_S = 0.05
MOST_BYTES = 1 << 20


class RendezvousError(Exception):
    """A group is not complete."""


class Rendezvous:
    """A rank's connections: rank 0 has one to each other rank, the others have one to rank 0.

    A context manager.  Raises `RendezvousError` if the group is not complete within `UP_S` seconds.
    """

    def __init__(self, own: Rank) -> None:
        self._own = own
        self._stack = ExitStack()
        self._files: dict[int, BufferedRWPair] = {}

    def __enter__(self) -> Rendezvous:
        try:
            if self._own.rank:
                self._keep(0, self._dial())
                self.send(0, self._own.rank)
            else:
                self._accept()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def world(self) -> int:
        return self._own.world

    def exchange(self, value: Any) -> list[Any]:
        """Return all ranks' values, by rank, when all have called it."""
        others = range(1, self._own.world)
        if self._own.rank:
            self.send(0, value)
            values: list[Any] = self.receive(0)
            return values
        values = [value, *(self.receive(rank) for rank in others)]
        for rank in others:
            self.send(rank, values)
        return values

    def send(self, rank: int, value: Any) -> None:
        self._files[rank].write(json.dumps(value).encode() + b"\n")
        self._files[rank].flush()

    def receive(self, rank: int) -> Any:
        """Receive a value.  Raises `RendezvousError` if the other rank has closed the connection."""
        line = self._files[rank].readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise RendezvousError(f"rank {rank} has left the group")
        return json.loads(line)

    def _accept(self) -> None:
        address = (self._own.master_host, self._own.master_port)
        until_s = time.monotonic() + UP_S
        with socket.create_server(address) as listener:
            while len(self._files) < self._own.world - 1:
                listener.settimeout(max(0.001, until_s - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    present = [0, *sorted(self._files)]
                    text = f"after {UP_S:g} s only ranks {present} of {self._own.world} have connected"
                    raise RendezvousError(text) from None
                with connection.makefile("rb", buffering=0) as first:
                    rank = int(first.readline(16))
                self._keep(rank, connection)

    def _dial(self) -> socket.socket:
        address = (self._own.master_host, self._own.master_port)
        until_s = time.monotonic() + UP_S
        while True:
            try:
                return socket.create_connection(address, timeout=UP_S)
            except OSError as error:
                if time.monotonic() > until_s:
                    text = f"rank 0 does not listen at {self._own.master} after {UP_S:g} s: {error}"
                    raise RendezvousError(text) from None
                time.sleep(AGAIN_S)  # rank 0 is still starting

    def _keep(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stack.enter_context(connection)
        file = connection.makefile("rwb")
        self._stack.enter_context(closing(file))
        self._files[rank] = file
