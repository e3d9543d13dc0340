"""Sends messages (a few integers and an optional payload) between processes over torch's gloo.

    int64   | payload bytes | head[0] | head[1] | ... |     always `HEAD` numbers
    uint8   | payload |                                     only if it is not empty

Messages between two processes arrive in the order in which they were sent.  A process that waits for one that
has exited gets an error from gloo as soon as the connection breaks, or at the group's timeout.  Nothing is
pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gridtrain.errors import RemoteProtocolError

HEAD = 7


class GlooChannel:
    """Sends and receives this process's messages within a group.

    Args:
        group: a group of torch.distributed with the gloo backend; ranks are those of this group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._in_flight: list[tuple[dist.Work, Tensor]] = []  # keeps tensors alive until they have been sent

    def send(self, to_rank: int, head: Sequence[int], payload: bytes | memoryview = b"") -> None:
        """Start sending a message with a head of at most `HEAD - 1` numbers; `wait_sent` waits until it has
        been sent."""
        numbers = [len(payload), *head, *[0] * (HEAD - 1 - len(head))]
        self._send_tensor(torch.tensor(numbers, dtype=torch.int64), to_rank)
        if len(payload):
            self._send_tensor(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to_rank)

    def receive(self, from_rank: int, most_bytes: int) -> tuple[list[int], bytes]:
        """Wait for the next message from `from_rank`; return its head, padded with zeros, and its payload.

        Raises:
            RemoteProtocolError: the payload is larger than `most_bytes`; nothing was allocated for it.
            RuntimeError: the connection to the process broke, or the group's timeout has passed.
        """
        numbers_H = torch.empty(HEAD, dtype=torch.int64)
        self._receive_tensor(numbers_H, from_rank)
        payload_bytes, *head = numbers_H.tolist()
        if not 0 <= payload_bytes <= most_bytes:
            raise RemoteProtocolError(
                f"local rank {from_rank} announced a payload of {payload_bytes} bytes; "
                f"a payload may have at most {most_bytes} bytes",
                remedy="run the same script and the same version of gridtrain in all processes",
            )
        if not payload_bytes:
            return head, b""
        data_B = torch.empty(payload_bytes, dtype=torch.uint8)
        self._receive_tensor(data_B, from_rank)
        return head, data_B.numpy().tobytes()

    def wait_sent(self) -> None:
        """Wait until all messages have been sent."""
        in_flight, self._in_flight = self._in_flight, []
        for work, _ in in_flight:
            work.wait()

    def close(self) -> None:
        """Destroy the group, unless it was already destroyed together with all other groups.

        This ends the group's threads; otherwise one that releases a tensor while the interpreter exits would
        abort the process.  Later calls do nothing.
        """
        group = vars(self).pop("group", None)  # its threads end with the last reference
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # torch.distributed was initialized again
                dist.destroy_process_group(group)

    def _send_tensor(self, tensor: Tensor, to_rank: int) -> None:
        work = dist.isend(tensor, group=self.group, group_dst=to_rank)
        assert work is not None  # this process is in the group
        self._in_flight.append((work, tensor))

    def _receive_tensor(self, tensor: Tensor, from_rank: int) -> None:
        dist.recv(tensor, group=self.group, group_src=from_rank)
