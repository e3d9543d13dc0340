"""An eavesdropper: captures every frame that crosses the internet's bridge, and finds given bytes in them.

It does not send, and does not see frames behind a router.

    bridge (promiscuous) -> packet socket -> thread -> frames
                                                         |
    found(pattern) <- TCP: segments in order, one byte string for each direction of each connection
                   <- all else (UDP, ARP, ...): frame by frame
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

from lab.net import BRIDGE, Net
from lab.ns import inside

KERNEL_BUFFER_BYTES = 64 << 20
LONGEST_FRAME_BYTES = 1 << 17  # with segmentation offload a "frame" has up to 64 KiB and its headers

_ETH_ALL, _ETH_IPV4, _TCP, _SYN = 0x0003, b"\x08\x00", 6, 0x02
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _ADD_MEMBERSHIP, _PROMISCUOUS, _STATISTICS = 263, 1, 1, 6


class Sniffer:
    """Captures inside its `with`; searches afterwards.

    Attributes:
        frames: the captured frames.
        dropped: the number of frames that the kernel dropped; "not found" means "not sent" only if it is 0.
    """

    def __init__(self, net: Net) -> None:
        self._net = net
        self.frames: list[bytes] = []
        self.dropped = 0
        self._texts: list[bytes] = []

    def __enter__(self) -> Sniffer:
        self._packets = inside(self._net.internet, _packet_socket)
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._capture, name="sniffer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the capture, with all frames sent before."""
        self._end.send(b"x")
        self._thread.join()
        for each in (self._packets, self._end, self._ended):
            each.close()
        self._texts = list(texts_of(self.frames))

    def found(self, pattern: bytes) -> bool:
        """Return whether the pattern was sent; to be called after the `with`."""
        assert len(pattern) >= 4, "chance would find it"
        return any(pattern in text for text in self._texts)

    def _capture(self) -> None:
        is_over = False
        while not is_over:
            ready, _, _ = select.select([self._packets, self._ended], [], [])
            is_over = self._ended in ready
            try:
                while True:
                    self.frames.append(self._packets.recv(LONGEST_FRAME_BYTES, socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
        _, self.dropped = struct.unpack("=II", self._packets.getsockopt(_SOL_PACKET, _STATISTICS, 8))


def _packet_socket() -> socket.socket:
    """Sees each frame that the bridge forwards once: on the bridge itself, not on its ports."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # protocol 0: no frames until it is bound
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, KERNEL_BUFFER_BYTES)
    number = socket.if_nametoindex(BRIDGE)
    packets.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, struct.pack("=iHH8x", number, _PROMISCUOUS, 0))
    packets.bind((BRIDGE, _ETH_ALL))
    return packets


def texts_of(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each part without a gap of each direction of each TCP connection, and each other frame."""
    firsts: dict[bytes, int] = {}  # of the connections that are open, by addresses and ports
    streams: dict[tuple[bytes, int], list[tuple[int, bytes]]] = {}
    for frame in frames:
        if frame[12:14] != _ETH_IPV4 or frame[23] != _TCP:
            yield frame
            continue
        ip = frame[14:]
        length = int.from_bytes(ip[2:4], "big") or None  # padding of short frames follows; 0: above 64 KiB
        tcp = ip[(ip[0] & 15) * 4 : length]
        flow, sequence = ip[12:20] + tcp[:4], int.from_bytes(tcp[4:8], "big")
        if tcp[13] & _SYN:
            sequence += 1
            firsts[flow] = sequence  # a later connection may use the same two ports
        first = firsts.setdefault(flow, sequence)
        part = (sequence - first) % 2**32, tcp[(tcp[12] >> 4) * 4 :]
        streams.setdefault((flow, first), []).append(part)
    for parts in streams.values():
        yield from pieces(parts)


def pieces(parts: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Assemble (offset, bytes), which may overlap and repeat; yield each part without a gap."""
    end, text = 0, bytearray()
    for offset, payload in sorted(parts):
        if offset > end:
            yield bytes(text)
            end, text = offset, bytearray()
        text += payload[end - offset :]
        end = max(end, offset + len(payload))
    yield bytes(text)
