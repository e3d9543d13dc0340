"""Sends messages (a few integers and an optional payload) between processes over torch's gloo backend.

    int64   | payload bytes | head[0] | head[1] | ... |     always `HEAD` numbers
    uint8   | payload |                                     only if it is not empty

Messages between two processes arrive in the order in which they were sent.  A process that waits for a
process that has exited gets an error from gloo as soon as the connection breaks, or at the timeout.  A
message is sent only when its receiver waits for it, so two processes that both call `wait_sent` before they
receive would deadlock.  A timeout breaks the connections to all processes of the group.  Nothing is pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gridtrain.errors import RemoteProtocolError

HEAD = 7


class GlooChannel:
    """Sends and receives this process's messages within a group.

    Args:
        group: a torch.distributed process group with the gloo backend; methods take ranks in this group.
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
        self._send_tensor(torch.tensor(numbers, dtype=torch.int64, device="cpu"), to_rank)
        if len(payload):
            self._send_tensor(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to_rank)

    def receive(
        self, from_rank: int, most_bytes: int, timeout_s: float | None = None
    ) -> tuple[list[int], bytes]:
        """Wait for the next message from `from_rank`; return its head, padded with zeros, and its payload.

        Args:
            timeout_s: replaces the group's timeout, for the head and for the payload.

        Raises:
            RemoteProtocolError: the payload is larger than `most_bytes`; nothing was allocated for it.
            RuntimeError: the connection to the process broke, or the timeout has passed.
        """
        numbers_H = torch.empty(HEAD, dtype=torch.int64, device="cpu")
        self._receive_tensor(numbers_H, from_rank, timeout_s)
        payload_bytes, *head = numbers_H.tolist()
        if not 0 <= payload_bytes <= most_bytes:
            raise RemoteProtocolError(
                f"local rank {from_rank} announced a payload of {payload_bytes} bytes; "
                f"a payload may have at most {most_bytes} bytes",
                remedy="run the same script and the same version of gridtrain in all processes",
            )
        if not payload_bytes:
            return head, b""
        data_B = torch.empty(payload_bytes, dtype=torch.uint8, device="cpu")
        self._receive_tensor(data_B, from_rank, timeout_s)
        return head, data_B.numpy().tobytes()

    def wait_sent(self, timeout_s: float | None = None) -> None:
        """Wait until all messages have been sent; `timeout_s` replaces the group's timeout.

        If messages cannot be sent, the first error is raised after the wait for all other messages.
        """
        in_flight, self._in_flight = self._in_flight, []
        failure: RuntimeError | None = None
        for work, _ in in_flight:
            try:
                _wait(work, timeout_s)
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Destroy the group, unless it was already destroyed together with all other groups.

        This ends the group's threads; otherwise, a thread that releases a tensor while the interpreter exits
        would abort the process.  Later calls do nothing.
        """
        group = vars(self).pop("group", None)  # its threads end with the last reference
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # torch.distributed was initialized again
                dist.destroy_process_group(group)

    def _send_tensor(self, tensor: Tensor, to_rank: int) -> None:
        work = dist.isend(tensor, dist.get_global_rank(self.group, to_rank), self.group)
        assert work is not None  # this process is in the group
        self._in_flight.append((work, tensor))

    def _receive_tensor(self, tensor: Tensor, from_rank: int, timeout_s: float | None) -> None:
        work = dist.irecv(tensor, dist.get_global_rank(self.group, from_rank), self.group)
        assert work is not None  # this process is in the group
        _wait(work, timeout_s)


def _wait(work: dist.Work, timeout_s: float | None) -> None:
    work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
