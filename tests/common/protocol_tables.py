"""Writes the tables of kinds, records and messages in PROTOCOL.md from their declarations.

    PYTHONPATH=.:tests/common python tests/common/protocol_tables.py

A row's last column, the meaning of the record or message, stays; a message is found by its code, a record by
its name.  The row of a new message is added by hand, with its code alone.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gridtrain.core.messages import declaration
from gridtrain.network.wire import field_encoding

FILE = Path(field_encoding.__file__).with_name("PROTOCOL.md")


def fields(record: field_encoding.RecordField) -> str:
    return "; ".join(f"`{name}`: {kind.name}" for name, kind in record.field_types.items()) or "none"


def inner_types(kind: Any) -> Iterator[Any]:
    """This field type and those inside of it, inner ones first."""
    match kind:
        case field_encoding.RecordField(field_types=inners):
            inners = list(inners.values())
        case field_encoding.TupleField(item_types=inners):
            pass
        case field_encoding.ListField(item_type=inner) | field_encoding.OptionalField(item_type=inner):
            inners = [inner]
        case _:
            inners = []
    for inner in inners:
        yield from inner_types(inner)
    yield kind


def used_types() -> dict[str, Any]:
    return {kind.name: kind for record in field_encoding.MESSAGES.values() for kind in inner_types(record)}


def kinds() -> dict[str, str]:
    """Name and bounds of every kind, in the order of the declarations."""
    declared = [declaration.BOOL, declaration.FLOAT]
    for name in vars(declaration):
        annotations = typing.get_args(getattr(declaration, name))
        declared += [one for one in annotations[1:] if isinstance(one, declaration.FieldType)]
    named = {kind.name: kind.bounds for kind in declared}
    enums = {
        kind.name: kind.bounds for kind in used_types().values() if isinstance(kind, field_encoding.EnumField)
    }
    return named | enums


def records() -> dict[str, field_encoding.RecordField]:
    codes = field_encoding.MESSAGES.values()
    return {
        n: k for n, k in used_types().items() if isinstance(k, field_encoding.RecordField) and k not in codes
    }


def update(text: str) -> str:
    """The text of PROTOCOL.md with its tables as the declarations are."""
    done: list[str] = []
    table = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            table = ""
        elif not table:
            table = cells[0]
            if table == "kind":
                done += [line, "|---|---|", *(f"| {name} | {bounds} |" for name, bounds in kinds().items())]
        elif set(cells[0]) != {"-"}:
            if table == "code":
                record = field_encoding.MESSAGES[int(cells[0])]
                line = f"| {cells[0]} | {record.name} | {fields(record)} | {cells[-1]} |"
            elif table == "record":
                line = f"| {cells[0]} | {fields(records()[cells[0]])} | {cells[-1]} |"
        if table != "kind":
            done.append(line)
    return "\n".join(done) + "\n"


if __name__ == "__main__":
    FILE.write_text(update(FILE.read_text(encoding="utf-8")), encoding="utf-8")
