"""A member of a benchmark: what it measures must not change what is measured."""

from __future__ import annotations

import weakref

from gridtrain.tools.bench.bench_member import BufferWork


class Buffer:
    def apply(self) -> None: ...

    def payload(self) -> bytes:
        return b"abc"

    def compute_digest(self) -> bytes:
        return b""


def test_a_measured_buffer_is_freed_at_once() -> None:
    work, buffer = BufferWork(), Buffer()
    work.instrument(buffer)
    assert (buffer.payload(), buffer.payload()) == (b"abc", b"abc")
    assert (work.payloads, work.payload_bytes) == (2, 6)
    assert work.seconds > 0
    freed = weakref.ref(buffer)
    del buffer
    assert freed() is None
