"""An eavesdropper: captures every frame that crosses the internet's bridge, and finds given bytes in them.

It assembles TCP streams from their segments.  It does not send, and does not see frames behind a router.

    bridge (promiscuous) -> packet socket -> thread -> capture file (pcap: tcpdump and Wireshark open it too)
                                                          |
    found(pattern) <- TCP: segments in order, one byte string for each direction of each connection
                   <- all else (UDP, ARP, ...): frame by frame

A capture counts missed frames: `dropped` by the kernel, and `over_limit` frames after `limit_bytes`.  "Not
found" counts only if both are 0 (`complete`).
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lab.net import BRIDGE, Net
from lab.ns import LabError, inside

DEFAULT_LIMIT_BYTES = 256 << 20
"""Of the capture file, which a search reads into memory."""

KERNEL_BUFFER_BYTES = 64 << 20
LONGEST_FRAME_BYTES = 1 << 17  # with segmentation offload a "frame" has up to 64 KiB and its headers
DRAIN_S = 5.0
_BATCH_FRAMES = 256

_ETH_ALL, _ETH_IPV4, _TCP = 0x0003, 0x0800, 6
_SYN = 0x02
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _ADD_MEMBERSHIP, _PROMISCUOUS, _STATISTICS = 263, 1, 1, 6
_PCAP_HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, LONGEST_FRAME_BYTES, 1)
_PCAP_FRAME = struct.Struct("<IIII")  # seconds, microseconds, captured bytes, original bytes


@dataclass(frozen=True, slots=True)
class Where:
    """One place where a pattern was seen: a stream and the byte in it, or a frame that is not TCP."""

    what: str
    offset: int

    def __str__(self) -> str:
        return f"{self.what}, byte {self.offset}"


class Sniffer:
    """Captures inside its `with`; searches afterwards.

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
        """No frame was missed, so that "not found" means "not sent"."""
        return not self.dropped and not self.over_limit

    def __enter__(self) -> Sniffer:
        try:
            packets = inside(self._net.internet, _packet_socket)
        except OSError as error:
            raise LabError(f"the bridge cannot be listened to: {error.strerror}") from None
        self._thread = threading.Thread(target=self._capture, args=(packets,), name="sniffer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the capture, with all frames sent before.  Raises `LabError` if the capture failed."""
        assert self._thread is not None
        self._wake_in.send(b"x")
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()
        if self._error is not None:
            raise LabError(f"the capture failed: {self._error}") from self._error

    def found(self, pattern: bytes) -> list[Where]:
        """All places of `pattern`; to be called after the `with`.

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
                while not self._stopping(packets):
                    self._read_some(packets, buffer, file)
                until_s = time.monotonic() + DRAIN_S  # frames may still arrive
                while self._read_some(packets, buffer, file) and time.monotonic() < until_s:
                    pass
                _, self.dropped = struct.unpack("=II", packets.getsockopt(_SOL_PACKET, _STATISTICS, 8))
        except BaseException as error:  # raised where the `with` ends
            self._error = error

    def _stopping(self, packets: socket.socket) -> bool:
        """Wait for a frame (False) or for the end (True)."""
        ready, _, _ = select.select([packets, self._wake_out], [], [])
        return self._wake_out in ready

    def _read_some(self, packets: socket.socket, buffer: bytearray, file: IO[bytes]) -> bool:
        """Read up to a batch; False: no more at the moment.  Frames beyond the limit are only counted."""
        for _ in range(_BATCH_FRAMES):
            try:
                nbytes = packets.recv_into(buffer, 0, socket.MSG_DONTWAIT | socket.MSG_TRUNC)
            except BlockingIOError:
                return False
            self.frames += 1
            size = _PCAP_FRAME.size + nbytes
            if self.over_limit or self.nbytes + size > self._limit_bytes or nbytes > len(buffer):
                self.over_limit += 1
                continue
            self.nbytes += size
            seconds, fraction = divmod(time.time(), 1)
            file.write(_PCAP_FRAME.pack(int(seconds), int(fraction * 1e6), nbytes, nbytes))
            file.write(memoryview(buffer)[:nbytes])
        return True


def _packet_socket() -> socket.socket:
    """Sees each frame that the bridge forwards once: on the bridge itself, not on its ports."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # protocol 0: no frames until it is bound
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, KERNEL_BUFFER_BYTES)
    number = socket.if_nametoindex(BRIDGE)
    packets.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, struct.pack("=iHH8x", number, _PROMISCUOUS, 0))
    packets.bind((BRIDGE, _ETH_ALL))
    return packets


# -- from frames to streams ----------------------------------------------------------------------


def frames_of(path: Path) -> Iterator[bytes]:
    """The frames in a capture file of `Sniffer`."""
    with path.open("rb") as file:
        file.seek(len(_PCAP_HEADER))
        while header := file.read(_PCAP_FRAME.size):
            yield file.read(_PCAP_FRAME.unpack(header)[2])


@dataclass(frozen=True, slots=True)
class Segment:
    """The TCP payload of one frame.  `flow`: "10.77.0.2:7700 > 10.77.0.3:41000"."""

    flow: str
    sequence: int
    begins: bool
    payload: bytes


def segment_of(frame: bytes) -> Segment | None:
    """None: the frame is not a whole TCP segment over IPv4."""
    if len(frame) < 34 or struct.unpack_from(">H", frame, 12)[0] != _ETH_IPV4:
        return None
    ip = frame[14:]
    header_bytes, total_bytes, fragment = (ip[0] & 15) * 4, *struct.unpack_from(">H2xH", ip, 2)
    if ip[9] != _TCP or fragment & 0x3FFF or len(ip) < header_bytes + 20:
        return None
    tcp = ip[header_bytes : total_bytes or None]  # followed by padding of short frames; 0: longer than 64 KiB
    source_port, target_port, sequence = struct.unpack_from(">HHI", tcp)
    source, target = socket.inet_ntoa(ip[12:16]), socket.inet_ntoa(ip[16:20])
    begins = bool(tcp[13] & _SYN)
    flow = f"{source}:{source_port} > {target}:{target_port}"
    return Segment(flow, (sequence + begins) % 2**32, begins, tcp[(tcp[12] >> 4) * 4 :])


@dataclass(slots=True)
class Stream:
    """One direction of one connection; segments may come in any order, more than once, and with gaps."""

    name: str
    first: int
    _last: int = 0
    _parts: list[tuple[int, bytes]] = field(default_factory=list)

    def add(self, sequence: int, payload: bytes) -> None:
        # The 32 bits wrap around: of all offsets that fit, take the one nearest to the previous segment.
        step = (sequence - self.first - self._last + 2**31) % 2**32 - 2**31
        self._last += step
        if payload:
            self._parts.append((self._last, payload))

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of each part without a gap."""
        start, text = 0, bytearray()
        for offset, payload in sorted(self._parts, key=lambda part: part[0]):
            end = start + len(text)
            if offset > end or not text:
                if text:
                    yield start, bytes(text)
                start, text = offset, bytearray(payload)
            else:
                text += payload[end - offset :]
        if text:
            yield start, bytes(text)


@dataclass(slots=True)
class Conversations:
    """All streams of a capture, in order."""

    streams: list[Stream] = field(default_factory=list)
    others: list[tuple[int, bytes]] = field(default_factory=list)
    _texts: list[tuple[str, int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, frames: Iterable[bytes]) -> Conversations:
        all_of_it, open_streams = cls(), dict[str, Stream]()
        for number, frame in enumerate(frames):
            segment = segment_of(frame)
            if segment is None:
                all_of_it.others.append((number, frame))
                continue
            stream = open_streams.get(segment.flow)
            again = stream is not None and segment.begins and stream.first != segment.sequence
            if stream is None or again:  # a new connection may use the same two ports
                stream = open_streams[segment.flow] = Stream(segment.flow, segment.sequence)
                all_of_it.streams.append(stream)
            stream.add(segment.sequence, segment.payload)
        return all_of_it

    def find(self, pattern: bytes) -> list[Where]:
        if not self._texts:  # assembled once, for all searches
            self._texts = [(stream.name, *piece) for stream in self.streams for piece in stream.pieces()]
            self._texts += [(f"frame {number}", 0, frame) for number, frame in self.others]
        return [
            Where(name, start + offset)
            for name, start, text in self._texts
            for offset in _offsets(text, pattern)
        ]


def _offsets(text: bytes, pattern: bytes) -> Iterator[int]:
    at = text.find(pattern)
    while at >= 0:
        yield at
        at = text.find(pattern, at + 1)
