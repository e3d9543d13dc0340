"""An eavesdropper: every frame that crosses the internet's bridge, and where given bytes are in them.

Decides what a TCP stream was, from its segments.  Never sends a frame, and never sees what stays behind one
router.

    bridge (promiscuous) -> packet socket -> thread -> capture file (pcap: tcpdump and Wireshark open it too)
                                                          |
    found(pattern) <- TCP: segments in order, one byte string for each direction of each connection
                   <- all else (UDP, ARP, ...): frame by frame

A capture says what it missed: `dropped` frames that the kernel had no room for, `over_limit` frames after
`limit_bytes`.  "Not found" counts only if both are 0 (`complete`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.net import BRIDGE, Net
from lab.ns import LabError

DEFAULT_LIMIT_BYTES = 1 << 30
KERNEL_BUFFER_BYTES = 64 << 20
LONGEST_FRAME_BYTES = 1 << 17  # with segmentation offload a "frame" has up to 64 KiB and its headers
SETTLE_S = 5.0
_BATCH_FRAMES = 256

_ETH_ALL, _ETH_IPV4, _TCP = 0x0003, 0x0800, 6
_SYN = 0x02
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _ADD_MEMBERSHIP, _PROMISCUOUS, _STATISTICS = 263, 1, 1, 6
_PCAP_HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, LONGEST_FRAME_BYTES, 1)
_PCAP_FRAME = struct.Struct("<IIII")  # seconds, microseconds, bytes kept, bytes there were


@dataclass(frozen=True, slots=True)
class Where:
    """One place where a pattern was seen: a stream and the byte in it, or a frame that is not TCP."""

    what: str
    offset: int

    def __str__(self) -> str:
        return f"{self.what}, byte {self.offset}"


class Sniffer:
    """Captures while its `with` is open; can be asked afterwards.

    Args:
        path: the capture file; it must fit `limit_bytes`.

    Raises `LabError` if the capture cannot begin.
    """

    def __init__(self, net: Net, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._net, self._path, self._limit_bytes = net, path, limit_bytes
        self.frames = self.nbytes = self.dropped = self.over_limit = 0
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._conversations: Conversations | None = None

    @property
    def complete(self) -> bool:
        """Nothing was missed, so that "not found" means "not there"."""
        return not self.dropped and not self.over_limit

    def __enter__(self) -> Sniffer:
        from lab.ns import inside

        try:
            packets = inside(self._net.internet, _packet_socket)
        except OSError as error:
            raise LabError(f"the bridge cannot be listened to: {error.strerror}") from None
        self._thread = threading.Thread(target=self._capture, args=(packets,), name="sniffer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """What was sent before is still captured.  Raises `LabError` if the capture failed."""
        assert self._thread is not None
        self._wake_in.send(b"x")
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()
        if self._error is not None:
            raise LabError(f"the capture failed: {self._error}") from self._error

    def found(self, pattern: bytes) -> list[Where]:
        """Everywhere that `pattern` was seen; to be asked after the `with`.

        Raises `ValueError` if it is so short that chance would find it.
        """
        if len(pattern) < 4:
            raise ValueError(f"the pattern has {len(pattern)} bytes; under 4 chance would find it")
        if self._conversations is None:
            self._conversations = Conversations.of(frames_of(self._path))
        return self._conversations.find(pattern)

    # -- the capturing thread --------------------------------------------------------------------

    def _capture(self, packets: socket.socket) -> None:
        try:
            with packets, self._path.open("wb", buffering=1 << 20) as file:
                file.write(_PCAP_HEADER)
                buffer = bytearray(LONGEST_FRAME_BYTES)
                while True:
                    ready, _, _ = select.select([packets, self._wake_out], [], [])
                    while self._read_some(packets, buffer, file):
                        pass
                    if self._wake_out in ready:
                        break
                _, self.dropped = struct.unpack("=II", packets.getsockopt(_SOL_PACKET, _STATISTICS, 8))
        except BaseException as error:  # raised where the `with` ends
            self._error = error

    def _read_some(self, packets: socket.socket, buffer: bytearray, file: object) -> bool:
        """Up to a batch; False: there are no more at the moment."""
        for _ in range(_BATCH_FRAMES):
            try:
                nbytes = packets.recv_into(buffer, 0, socket.MSG_DONTWAIT | socket.MSG_TRUNC)
            except BlockingIOError:
                return False
            self.frames += 1
            kept = min(nbytes, len(buffer))
            if self.nbytes + kept + _PCAP_FRAME.size > self._limit_bytes:
                self.over_limit += 1
                continue
            self.nbytes += kept + _PCAP_FRAME.size
            seconds, fraction = divmod(time.time(), 1)
            file.write(_PCAP_FRAME.pack(int(seconds), int(fraction * 1e6), kept, nbytes))  # type: ignore[attr-defined]
            file.write(memoryview(buffer)[:kept])  # type: ignore[attr-defined]
        return True


def _packet_socket() -> socket.socket:
    """Sees each frame that the bridge forwards once: on the bridge itself, not on its ports."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # protocol 0: silent until it is bound
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, KERNEL_BUFFER_BYTES)
    number = socket.if_nametoindex(BRIDGE)
    packets.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, struct.pack("=iHH8x", number, _PROMISCUOUS, 0))
    packets.bind((BRIDGE, _ETH_ALL))
    return packets
