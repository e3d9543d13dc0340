"""Layout and bytes of every message are those of golden.json, which changes only with PROTOCOL_VERSION.

For a new PROTOCOL_VERSION, and only then, this writes the file again:

    PYTHONPATH=.:tests/common python tests/network/wire/test_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from wire_samples import layout, sample

from gridtrain.core.messages import PROTOCOL_VERSION
from gridtrain.network.wire import codec, field_encoding

FILE = Path(__file__).with_name("golden.json")
SAMPLES_PER_MESSAGE = 3


def messages_of(code: int) -> list[Any]:
    random = Random(code)
    return [sample(field_encoding.MESSAGES[code], random) for _ in range(SAMPLES_PER_MESSAGE)]


def entry(code: int) -> dict[str, Any]:
    frames = [[bytes(frame).hex() for frame in codec.encode(message)] for message in messages_of(code)]
    return {"layout": layout(field_encoding.MESSAGES[code]), "frames": frames}


def current() -> dict[str, Any]:
    return {
        "version": PROTOCOL_VERSION,
        "messages": {str(code): entry(code) for code in sorted(field_encoding.MESSAGES)},
    }


GOLDEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}


def test_the_golden_file_is_of_this_version() -> None:
    assert GOLDEN["version"] == PROTOCOL_VERSION, "a new version: write golden.json again"
    assert set(GOLDEN["messages"]) == set(map(str, field_encoding.MESSAGES)), (
        "new messages are a new PROTOCOL_VERSION"
    )


@pytest.mark.parametrize("code", sorted(field_encoding.MESSAGES))
def test_a_message_has_the_bytes_of_its_version(code: int) -> None:
    golden = GOLDEN["messages"][str(code)]
    assert entry(code) == golden, "what travels differs: that is a new PROTOCOL_VERSION"
    frames = [[bytes.fromhex(frame) for frame in frames] for frames in golden["frames"]]
    assert [codec.decode(each) for each in frames] == messages_of(code)


if __name__ == "__main__":
    FILE.write_text(json.dumps(current(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
