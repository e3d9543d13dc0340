"""PROTOCOL.md: its tables are those of the declarations, and its examples are run in both directions."""

from __future__ import annotations

import re
from importlib.resources import files

import numpy as np
import protocol_tables
import pytest

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import MAX_STALE_MESSAGES
from gridtrain.network.transport.send_queue import MAX_ENCRYPTED_CONTROL_BYTES
from gridtrain.network.wire import codec, field_encoding, sparse_payload
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.state_transfer.update_log import vote_digest

TEXT = (files("gridtrain.network.wire") / "PROTOCOL.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_declarations() -> None:
    assert protocol_tables.update(TEXT) == TEXT, "run tests/common/protocol_tables.py"


def test_every_message_and_every_record_has_a_row() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \| [A-Z]", TEXT, re.MULTILINE)]
    assert sorted(codes) == sorted(field_encoding.MESSAGES)
    for name in protocol_tables.records():
        assert f"\n| {name} | `" in TEXT


# -- examples ------------------------------------------------------------------------------------


def examples(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"no {language} example in PROTOCOL.md"
    return found


def hex_after(label: str, text: str) -> bytes | None:
    found = re.search(rf"^{label}: ((?:[0-9a-f]{{2}}\s+)+)", text, re.MULTILINE)
    return bytes.fromhex(found[1]) if found else None


@pytest.mark.parametrize("example", examples("message"))
def test_message_example(example: str) -> None:
    expression = example.partition("frame 0:")[0]
    frames = [frame for i in (0, 1) if (frame := hex_after(f"frame {i}", example)) is not None]
    message = eval(expression, dict(vars(m)))  # our own text

    assert [bytes(frame) for frame in codec.encode(message)] == frames
    assert codec.decode(frames) == message


@pytest.mark.parametrize("example", examples("sparse"))
def test_sparse_example(example: str) -> None:
    expression = example.partition("bytes:")[0]
    payload = hex_after("bytes", example)
    call = {"np": np, "ValueKind": ValueKind}
    assert eval(expression, {**call, "encode": sparse_payload.encode}) == payload

    def check(indices: np.ndarray, values: np.ndarray, *, n: int, kind: ValueKind) -> None:
        back = sparse_payload.decode(payload or b"", n=n, max_entries=len(indices), kind=kind)
        assert back.indices.tolist() == indices.tolist()
        assert back.values.tolist() == values.tolist()

    eval(expression, {**call, "encode": check})


@pytest.mark.parametrize("example", examples("digest"))
def test_digest_example(example: str) -> None:
    expression = example.partition("bytes:")[0]
    assert eval(expression, {"vote_digest": vote_digest}) == hex_after("bytes", example)


def test_limits_in_the_text_are_those_of_the_code() -> None:
    assert f"longer than {MAX_ENCRYPTED_CONTROL_BYTES >> 10} KiB, else control" in TEXT
    assert f"more than {MAX_STALE_MESSAGES:,} messages of older rounds" in TEXT


def test_the_code_of_hello_never_changes() -> None:
    assert "`[1, peer, version, software]`" in TEXT
    assert list(field_encoding.MESSAGES[1].field_types) == ["peer", "version", "software"]


def test_the_version_is_the_codes() -> None:
    assert f"# The gridtrain protocol, version {m.PROTOCOL_VERSION}\n" in TEXT
    assert f"\nHello(peer=bytes(range(32)), version={m.PROTOCOL_VERSION}, " in TEXT
