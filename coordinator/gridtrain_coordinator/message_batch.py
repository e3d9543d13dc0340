"""Encodes a message that goes to many workers, such as the list of members, only once.

Send(anna, page) --+
Send(bert, page) --+--> the frames of `page`       N members receive the same pages of a member list
Send(clara, page) -+
"""

from __future__ import annotations

from gridtrain.core.messages import Message
from gridtrain.network.transport.interface import Frames
from gridtrain.network.wire import codec


class MessageBatch:
    """Encodes messages; a message object that has already been encoded is not encoded again.

    The messages must not change while the batch exists.  Use a new batch in each iteration of the loop.
    """

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[Message, Frames]] = {}  # by the identity of a message

    def encode(self, message: Message) -> Frames:
        """Return the frames of a message.  Raises `LocalProtocolError` as `codec.encode` does."""
        known = self._encoded.get(id(message))
        if known is None:
            known = self._encoded[id(message)] = message, codec.encode(message)
        return known[1]
