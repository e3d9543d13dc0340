"""Converts the fields of messages to plain values and back, according to their declarations (`MESSAGES`).

`gridtrain.core.messages.declaration` specifies how a message is declared, and defines the field types of
single values.  This module defines the field types that are composed of other field types.

    value  -- FieldType.pack -->    plain value     a FieldError means a bug in this process
    value  <-- FieldType.unpack --  plain value     a FieldError means that the peer violates the protocol

Plain values are the values that msgpack can encode: integers, strings, byte strings, arrays and the like.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Annotated, Any

from gridtrain.core.messages.declaration import (
    BOOL,
    FLOAT,
    MESSAGE_TYPES,
    AtMost,
    FieldError,
    FieldType,
    IntField,
    PayloadField,
    describe,
)


class EnumField(FieldType):
    def __init__(self, enum: type[IntEnum]) -> None:
        self.enum = enum
        self._members = {member.value: member for member in enum}
        self.name = enum.__name__
        self.bounds = "one of " + ", ".join(f"{member.value} {member.name}" for member in enum)

    def pack(self, value: Any) -> int:
        if type(value) is not self.enum:
            raise FieldError(f"{describe(value)}; it must be {self.bounds}")
        return value.value

    def unpack(self, plain: Any) -> IntEnum:
        member = self._members.get(plain) if type(plain) is int else None
        if member is None:
            raise FieldError(f"{describe(plain)}; it must be {self.bounds}")
        return member


class OptionalField(FieldType):
    def __init__(self, item_type: FieldType) -> None:
        self.item_type = item_type
        self.name = f"{item_type.name}?"

    def pack(self, value: Any) -> Any:
        return None if value is None else self.item_type.pack(value)

    def unpack(self, plain: Any) -> Any:
        return None if plain is None else self.item_type.unpack(plain)


class ListField(FieldType):
    def __init__(self, item_type: FieldType, max_items: int) -> None:
        self.item_type, self.max_items = item_type, max_items
        self.name = f"{item_type.name}[0..{max_items}]"

    def pack(self, value: Any) -> tuple[Any, ...]:
        return self._convert_each(value, self.item_type.pack)

    def unpack(self, plain: Any) -> tuple[Any, ...]:
        return self._convert_each(plain, self.item_type.unpack)

    def _convert_each(self, items: Any, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
        if type(items) is not tuple or len(items) > self.max_items:
            size = f"{len(items)} items" if type(items) is tuple else describe(items)
            raise FieldError(f"{size}; it must be an array of at most {self.max_items} items")
        done: list[Any] = []
        try:
            for item in items:
                done.append(convert(item))
        except FieldError as error:
            raise error.prefix_path(f"[{len(done)}]") from None
        return tuple(done)


class TupleField(FieldType):
    """An array of fixed length; each item has its own type."""

    def __init__(self, *item_types: FieldType) -> None:
        self.item_types = item_types
        self.name = f"({', '.join(item_type.name for item_type in item_types)})"

    def pack(self, value: Any) -> tuple[Any, ...]:
        self._check_length(value)
        return tuple(kind.pack(item) for kind, item in zip(self.item_types, value, strict=True))

    def unpack(self, plain: Any) -> tuple[Any, ...]:
        self._check_length(plain)
        return tuple(kind.unpack(item) for kind, item in zip(self.item_types, plain, strict=True))

    def _check_length(self, items: Any) -> None:
        if type(items) is not tuple or len(items) != len(self.item_types):
            raise FieldError(f"{describe(items)}; it must be an array of {len(self.item_types)} items")


class RecordField(FieldType):
    """A dataclass, encoded as an array of its fields in order."""

    def __init__(self, cls: type, field_types: dict[str, FieldType]) -> None:
        self.cls, self.field_types = cls, field_types
        self.name = cls.__name__
        self._find_problem: Callable[[Any], str | None] | None = getattr(cls, "find_problem", None)
        self._header = tuple(
            (n, kind) for n, kind in field_types.items() if not isinstance(kind, PayloadField)
        )
        self.has_frame = len(self._header) < len(field_types)

    def pack(self, value: Any) -> list[Any]:
        """Return the plain values of all fields except the payload."""
        if type(value) is not self.cls:
            raise FieldError(f"{describe(value)}; it must be of type {self.name}")
        plain: list[Any] = []
        try:
            for name, kind in self._header:
                plain.append(kind.pack(getattr(value, name)))
        except FieldError as error:
            raise error.prefix_path(self._header[len(plain)][0]) from None
        self._check_rule(value)
        return plain

    def unpack(self, plain: Any, *frame: Any) -> Any:
        if type(plain) is not tuple or len(plain) != len(self._header):
            size = f"{len(plain)} fields" if type(plain) is tuple else describe(plain)
            raise FieldError(f"{size}; it must be an array of the {len(self._header)} fields of {self.name}")
        values: list[Any] = []
        try:
            for (_, kind), item in zip(self._header, plain, strict=True):
                values.append(kind.unpack(item))
        except FieldError as error:
            raise error.prefix_path(self._header[len(values)][0]) from None
        value = self.cls(*values, *frame)
        self._check_rule(value)
        return value

    def _check_rule(self, value: Any) -> None:
        if self._find_problem is not None and (problem := self._find_problem(value)):
            raise FieldError(problem)


class RepeatedRecordField(RecordField):
    """A record of integers that is often the same in consecutive messages; the last conversion is cached."""

    def __init__(self, cls: type, field_types: dict[str, FieldType]) -> None:
        super().__init__(cls, field_types)
        self._last_packed: tuple[Any, Any] = (None, None)  # (value, plain)
        self._last_unpacked: tuple[Any, Any] = (None, None)  # separate, because peers may be in another round

    def pack(self, value: Any) -> list[Any]:
        last, known = self._last_packed
        if value is last and last is not None:
            return known  # type: ignore[no-any-return]
        plain = super().pack(value)
        self._last_packed = value, plain
        return plain

    def unpack(self, plain: Any, *frame: Any) -> Any:
        value, known = self._last_unpacked
        # Types are also compared, because True == 1.
        if type(plain) is tuple and plain == known and set(map(type, plain)) == {int}:
            return value
        value = super().unpack(plain)
        self._last_unpacked = value, plain
        return value


def _field_type(hint: Any) -> FieldType:
    """Return the field type for an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return BOOL
    if hint is float:
        return FLOAT
    if origin is Annotated:
        if isinstance(bound := arguments[1], AtMost):
            return ListField(_field_type(typing.get_args(arguments[0])[0]), bound.items)
        return typing.cast(FieldType, bound)
    if origin in (types.UnionType, typing.Union):
        return OptionalField(_field_type(arguments[0]))
    if origin is tuple and ... not in arguments:
        return TupleField(*map(_field_type, arguments))
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return EnumField(hint)
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        return record_field(hint)
    raise TypeError(
        f"the annotation {hint} has no bounds; use a type from gridtrain.core.messages.declaration"
    )


@cache
def record_field(cls: type) -> RecordField:
    """Return the field type for a dataclass, which is a message or a part of a message."""
    hints = typing.get_type_hints(cls, include_extras=True)
    field_types = {name: _field_type(hint) for name, hint in hints.items()}
    of_integers = all(isinstance(kind, IntField) for kind in field_types.values())
    is_repeated = of_integers and cls not in MESSAGE_TYPES.values() and not hasattr(cls, "find_problem")
    return (RepeatedRecordField if is_repeated else RecordField)(cls, field_types)


MESSAGES: dict[int, RecordField] = {code: record_field(cls) for code, cls in MESSAGE_TYPES.items()}
