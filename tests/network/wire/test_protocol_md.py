"""PROTOCOL.md is normative: its tables are the schema's, and its examples are run in both directions."""

from __future__ import annotations

import re
from importlib.resources import files

import numpy as np
import pytest

from gridtrain.core import messages as m
from gridtrain.network.wire import codec, field_types, schema, sparse_payload

TEXT = (files("gridtrain.network.wire") / "PROTOCOL.md").read_text(encoding="utf-8")
LEAVES = {
    kind.name: kind.bounds
    for kind in vars(schema).values()
    if isinstance(kind, field_types.FieldType) and hasattr(kind, "bounds")
}


def rows(first_heading: str) -> list[list[str]]:
    """The rows of all tables whose first column is headed so."""
    found: list[list[str]] = []
    inside = False
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first_heading:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            found.append(cells)
    return found


def fields(record: field_types.RecordField) -> str:
    return "; ".join(f"`{name}`: {kind.name}" for name, kind in record.field_types.items()) or "none"


def test_every_message_is_documented_with_its_fields() -> None:
    documented = {int(code): (name, text) for code, name, text, _ in rows("code")}
    assert documented == {code: (record.name, fields(record)) for code, record in schema.MESSAGES.items()}


def test_every_record_is_documented_with_its_fields() -> None:
    documented = {name: text for name, text, _ in rows("record")}
    assert documented == {record.name: fields(record) for record in schema.RECORDS}


def test_every_kind_is_documented_with_its_bounds() -> None:
    assert {name: text for name, text in rows("kind")} == LEAVES


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
    call = {"np": np, "ValueKind": sparse_payload.ValueKind}
    assert eval(expression, {**call, "encode": sparse_payload.encode}) == payload

    def check(indices: np.ndarray, values: np.ndarray, *, n: int, kind: sparse_payload.ValueKind) -> None:
        back = sparse_payload.decode(payload or b"", n=n, max_entries=len(indices), kind=kind)
        assert back.indices.tolist() == indices.tolist()
        assert back.values.tolist() == values.tolist()

    eval(expression, {**call, "encode": check})


def test_the_code_of_hello_never_changes() -> None:
    assert "`[1, peer, version, software]`" in TEXT
    assert list(schema.MESSAGES[1].field_types) == ["peer", "version", "software"]


def test_the_version_is_the_codes() -> None:
    assert f"# The gridtrain protocol, version {m.PROTOCOL_VERSION}\n" in TEXT
