"""A CURVE client that can send a message without an end, which libzmq's client cannot.

It implements ZMTP 3.1 (RFC 37) with the CURVE mechanism (RFC 26) for a DEALER, over one blocking socket.

    greeting, HELLO --->  <--- greeting, WELCOME     INITIATE --->  <--- READY     MESSAGE ... --->
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

import nacl.public

from gridtrain.network.transport.identity import Identity

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
COMMAND, LONG = 0x04, 0x02


class Refused(Exception):
    """The server closed the connection, or answered with an error."""


class CurveConnection:
    """A connection as `identity` to the server with the public key `server`.

    Raises `Refused` and `OSError`, as all methods do.
    """

    def __init__(
        self, identity: Identity, server: bytes, host: str, port: int, *, timeout_s: float = 5.0
    ) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self._nonce = 0
        self._buffered: bytearray | None = None
        try:
            self._shake_hands(identity, nacl.public.PublicKey(server))
        except BaseException:
            self._socket.close()
            raise

    def send(self, frames: Sequence[bytes | memoryview], *, more: bool = False) -> None:
        """Send the frames as one message, or with `more` as a part of a message."""
        for number, frame in enumerate(frames):
            last = number == len(frames) - 1 and not more
            encrypted = self._session.encrypt(
                bytes([not last]) + bytes(frame), self._next("CurveZMQMESSAGEC")
            ).ciphertext
            self._write(0, b"\x07MESSAGE" + struct.pack(">Q", self._nonce) + encrypted)

    def burst_and_reset(self, frames: Sequence[bytes | memoryview], count: int) -> None:
        """Send `count` messages, with a PING after each of the last two thirds, in one write; then reset.

        A receiver whose queue was full when the reset arrived then reads a PING, and must not crash.
        """
        self._buffered = bytearray()
        for number in range(count):
            self.send(frames)
            if number > count // 3:
                ping = b"\x02\x04PING" + bytes(2)
                encrypted = self._session.encrypt(ping, self._next("CurveZMQMESSAGEC")).ciphertext
                self._write(0, b"\x07MESSAGE" + struct.pack(">Q", self._nonce) + encrypted)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.sendall(self._buffered)
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    def _shake_hands(self, identity: Identity, server: nacl.public.PublicKey) -> None:
        own, short = nacl.public.PrivateKey(identity.secret), nacl.public.PrivateKey.generate()
        half = bytes(short.public_key)
        self._socket.sendall(GREETING)
        self._read(64)
        hello = nacl.public.Box(short, server).encrypt(bytes(64), self._next("CurveZMQHELLO---")).ciphertext
        self._write(COMMAND, b"\x05HELLO\x01\x00" + bytes(72) + half + struct.pack(">Q", self._nonce) + hello)
        welcome = self._command(b"\x07WELCOME")
        opened = nacl.public.Box(short, server).decrypt(welcome[16:], b"WELCOME-" + welcome[:16])
        server_short, cookie = nacl.public.PublicKey(opened[:32]), opened[32:]
        self._session = nacl.public.Box(short, server_short)
        salt = os.urandom(16)
        vouch = (
            nacl.public.Box(own, server_short).encrypt(half + bytes(server), b"VOUCH---" + salt).ciphertext
        )
        inside = (
            identity.public
            + salt
            + vouch
            + _property(b"Socket-Type", b"DEALER")
            + _property(b"Identity", b"")
        )
        encrypted = self._session.encrypt(inside, self._next("CurveZMQINITIATE")).ciphertext
        self._write(COMMAND, b"\x08INITIATE" + cookie + struct.pack(">Q", self._nonce) + encrypted)
        self._command(b"\x05READY")

    def _next(self, use: str) -> bytes:
        self._nonce += 1
        return use.encode() + struct.pack(">Q", self._nonce)

    def _write(self, flags: int, body: bytes) -> None:
        long = len(body) > 255
        head = bytes([flags | LONG]) + struct.pack(">Q", len(body)) if long else bytes([flags, len(body)])
        if self._buffered is None:
            self._socket.sendall(head + body)
        else:
            self._buffered += head + body

    def _command(self, name: bytes) -> bytes:
        flags = self._read(1)[0]
        length = struct.unpack(">Q", self._read(8))[0] if flags & LONG else self._read(1)[0]
        body = self._read(length)
        if not body.startswith(name):
            raise Refused(f"answered with {body[:6]!r} instead of {name!r}")
        return body[len(name) :]

    def _read(self, nbytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            part = self._socket.recv(nbytes - len(parts))
            if not part:
                raise Refused("the connection was closed")
            parts += part
        return bytes(parts)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
