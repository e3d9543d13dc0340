"""Records what each process of a group sends and receives, for test_secrecy.py.

Python imports this module from PYTHONPATH in every process: coordinator, agents, training scripts.

    $LAB_SPY/<member>-<pid>.sent        a line for each payload: its message, and some bytes in hexadecimal
    $LAB_SPY/<member>-<pid>.received    all received frames, decrypted
"""

from __future__ import annotations

import os
import random

SAMPLE_BYTES = 24
VARIED = 12
"""Least number of different bytes in a sample, so that it (zeros, for example) is not found by chance."""


def install(folder: str) -> None:
    from gridtrain.network.wire import codec

    member = os.path.basename(os.environ.get("XDG_STATE_HOME", "unknown")).removeprefix("state-")
    stem = os.path.join(folder, f"{member}-{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    as_frame, decode = codec._as_frame, codec.decode
    files: dict[str, int] = {}

    def write(kind: str, data: bytes) -> None:
        if kind not in files:
            files[kind] = os.open(f"{stem}.{kind}", flags, 0o600)
        os.write(files[kind], data)

    def spy_as_frame(payload, name):
        frame = as_frame(payload, name)
        if name in ("Data", "StateBlock") and (sample := sample_of(bytes(frame))):
            write("sent", f"{name} {sample.hex()}\n".encode())
        return frame

    def spy_decode(frames):
        for frame in frames:
            write("received", bytes(frame))
        return decode(frames)

    codec._as_frame, codec.decode = spy_as_frame, spy_decode


def sample_of(payload: bytes) -> bytes:
    """Return some bytes of the payload, from a random position; empty if no varied bytes were found."""
    for _ in range(10):
        start = random.randrange(max(1, len(payload) - SAMPLE_BYTES))
        sample = payload[start : start + SAMPLE_BYTES]
        if len(set(sample)) >= VARIED:
            return sample
    return b""


if os.environ.get("LAB_SPY"):
    install(os.environ["LAB_SPY"])
