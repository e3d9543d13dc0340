"""What a field of a message may hold: one small class for each kind of value.

Decides which values may travel, in both directions alike.  Knows no message (that is `schema`) and
nothing of msgpack: a kind turns a value into plain data (int, float, bool, None, str, bytes, tuple)
and back.

    value  -- Kind.pack -->    plain data     raises BoundError: our own bug
    value  <-- Kind.unpack --  plain data     raises BoundError: the peer's fault
"""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from typing import Any


class FieldError(Exception):
    """A value is not of its kind.  `path` grows from the inside out: "members[3].peer"."""

    def __init__(self, problem: str, path: str = "") -> None:
        self.problem = problem
        self.path = path
        super().__init__(problem, path)

    def prefix_path(self, where: str) -> FieldError:
        joint = "." if self.path and not self.path.startswith("[") else ""
        return FieldError(self.problem, f"{where}{joint}{self.path}")

    def __str__(self) -> str:
        return f"{self.path} is {self.problem}"


class FieldType(ABC):
    """What a field may hold.  `name` is the word for it in PROTOCOL.md, `bounds` a leaf's definition."""

    name: str
    bounds: str

    @abstractmethod
    def pack(self, value: Any) -> Any:
        """Check and make plain.  Raises `BoundError`."""

    def unpack(self, plain: Any) -> Any:
        """Check and make a value.  Raises `BoundError`.  For most leaves the same as `pack`."""
        return self.pack(plain)


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


# -- leaves ----------------------------------------------------------------------------------------


class IntField(FieldType):
    def __init__(self, name: str, low: int, high: int, bounds: str) -> None:
        self.name, self.bounds, self.low, self.high = name, bounds, low, high

    def pack(self, value: Any) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise FieldError(f"{_describe(value)}, must be {self.bounds}")
        return value


class BoolField(FieldType):
    name = "bool"
    bounds = "true or false"

    def pack(self, value: Any) -> bool:
        if type(value) is not bool:
            raise FieldError(f"{_describe(value)}, must be {self.bounds}")
        return value


class FloatField(FieldType):
    def __init__(self, name: str, low: float, high: float, bounds: str) -> None:
        self.name, self.bounds, self.low, self.high = name, bounds, low, high

    def pack(self, value: Any) -> float:
        if type(value) is int:  # Python's own rule: an int is a float where a float is asked for
            value = float(value)
        return self.unpack(value)

    def unpack(self, plain: Any) -> float:
        # NaN is not between any two numbers.
        if not isinstance(plain, float) or not self.low <= plain <= self.high:
            raise FieldError(f"{_describe(plain)}, must be {self.bounds}")
        return float(plain)


class BytesField(FieldType):
    def __init__(self, name: str, low: int, high: int, bounds: str) -> None:
        self.name, self.bounds, self.low, self.high = name, bounds, low, high

    def pack(self, value: Any) -> bytes:
        if type(value) is not bytes or not self.low <= len(value) <= self.high:
            size = f"{len(value)} bytes" if type(value) is bytes else _describe(value)
            raise FieldError(f"{size}, must be {self.bounds}")
        return value


class TextField(FieldType):
    """UTF-8 without control characters: it is printed on terminals."""

    _forbidden = re.compile(r"[\x00-\x1f\x7f-\x9f]")

    def __init__(self, name: str, max_bytes: int, bounds: str) -> None:
        self.name, self.bounds, self.max_bytes = name, bounds, max_bytes

    def pack(self, value: Any) -> str:
        if type(value) is not str:
            raise FieldError(f"{_describe(value)}, must be {self.bounds}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise FieldError(f"{_describe(value)}, must be valid UTF-8") from None
        if size > self.max_bytes or self._forbidden.search(value):
            raise FieldError(f"{size} bytes, {reprlib.repr(value)}, must be {self.bounds}")
        return value


class ReasonField(TextField):
    """A sentence for people.  Ours is made to fit, because a long one is no reason to crash."""

    _forbidden = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

    def pack(self, value: Any) -> str:
        if type(value) is not str:
            raise FieldError(f"{_describe(value)}, must be {self.bounds}")
        printable = self._forbidden.sub(" ", value).encode(errors="replace")
        return printable[: self.max_bytes].decode(errors="ignore")

    def unpack(self, plain: Any) -> str:
        return super().pack(plain)


class WordField(FieldType):
    def __init__(self, name: str, *words: str) -> None:
        self.name, self.words = name, frozenset(words)
        self.bounds = "one of " + ", ".join(words)

    def pack(self, value: Any) -> str:
        if type(value) is not str or value not in self.words:
            raise FieldError(f"{_describe(value)}, must be {self.bounds}")
        return value


# -- compounds -------------------------------------------------------------------------------------


class EnumField(FieldType):
    def __init__(self, enum: type[IntEnum]) -> None:
        self.enum = enum
        self.name = enum.__name__
        self.bounds = "one of " + ", ".join(f"{member.value} {member.name}" for member in enum)

    def pack(self, value: Any) -> int:
        if type(value) is not self.enum:
            raise FieldError(f"{_describe(value)}, must be {self.bounds}")
        return value.value

    def unpack(self, plain: Any) -> IntEnum:
        try:
            return self.enum(plain if type(plain) is int else -1)
        except ValueError:
            raise FieldError(f"{_describe(plain)}, must be {self.bounds}") from None


class OptionalField(FieldType):
    def __init__(self, kind: FieldType) -> None:
        self.item_type = kind
        self.name = f"{kind.name}?"

    def pack(self, value: Any) -> Any:
        return None if value is None else self.item_type.pack(value)

    def unpack(self, plain: Any) -> Any:
        return None if plain is None else self.item_type.unpack(plain)


class ListField(FieldType):
    def __init__(self, kind: FieldType, max_items: int) -> None:
        self.item_type, self.max_items = kind, max_items
        self.name = f"{kind.name}[0..{max_items}]"

    def pack(self, value: Any) -> tuple[Any, ...]:
        return self._each(value, self.item_type.pack)

    def unpack(self, plain: Any) -> tuple[Any, ...]:
        return self._each(plain, self.item_type.unpack)

    def _each(self, items: Any, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
        if type(items) is not tuple or len(items) > self.max_items:
            size = f"{len(items)} items" if type(items) is tuple else _describe(items)
            raise FieldError(f"{size}, must be an array of at most {self.max_items}")
        done: list[Any] = []
        try:
            for item in items:
                done.append(convert(item))
        except FieldError as error:
            raise error.prefix_path(f"[{len(done)}]") from None
        return tuple(done)


class TupleField(FieldType):
    """An array of fixed length, each item of its own kind."""

    def __init__(self, *kinds: FieldType) -> None:
        self.item_types = kinds
        self.name = f"({', '.join(kind.name for kind in kinds)})"

    def pack(self, value: Any) -> tuple[Any, ...]:
        self._check_length(value)
        return tuple(kind.pack(item) for kind, item in zip(self.item_types, value, strict=True))

    def unpack(self, plain: Any) -> tuple[Any, ...]:
        self._check_length(plain)
        return tuple(kind.unpack(item) for kind, item in zip(self.item_types, plain, strict=True))

    def _check_length(self, items: Any) -> None:
        if type(items) is not tuple or len(items) != len(self.item_types):
            raise FieldError(f"{_describe(items)}, must be an array of {len(self.item_types)}")


class PayloadField(FieldType):
    """The payload, which is no part of the header: the whole of frame 1."""

    name = "frame 1"
    bounds = "0 .. 64 MiB, opaque here"

    def pack(self, value: Any) -> Any:
        raise NotImplementedError("a payload is no part of the header")


class RecordField(FieldType):
    """A dataclass as an array of its fields in order, with an optional rule about all of them."""

    def __init__(
        self,
        cls: type,
        rule: Callable[[Any], str | None] | None = None,
        *,
        recurs: bool = False,
        **kinds: FieldType,
    ) -> None:
        """`recurs`: of integers alone, and the same in many messages on end: the last one is remembered."""
        self._is_repeated = recurs
        self._last_packed: tuple[Any, Any] = (None, None)  # value and its plain form, as sent
        self._last_unpacked: tuple[Any, Any] = (None, None)  # as read: of others, in another round perhaps
        declared = tuple(field.name for field in fields(cls))
        if declared != tuple(kinds):
            raise TypeError(f"{cls.__name__} has the fields {declared}, its schema {tuple(kinds)}")
        self.cls, self.rule, self.field_types = cls, rule, kinds
        self.name = cls.__name__
        self.has_frame = bool(kinds) and isinstance(kinds[declared[-1]], PayloadField)
        self._header = tuple(
            (name, kind) for name, kind in kinds.items() if not isinstance(kind, PayloadField)
        )

    def pack(self, value: Any) -> list[Any]:
        """The header's fields, without frame 1."""
        last, known = self._last_packed
        if value is last and self._is_repeated:
            return known  # type: ignore[no-any-return]
        if type(value) is not self.cls:
            raise FieldError(f"{_describe(value)}, must be a {self.name}")
        plain: list[Any] = []
        try:
            for name, kind in self._header:
                plain.append(kind.pack(getattr(value, name)))
        except FieldError as error:
            raise error.prefix_path(self._header[len(plain)][0]) from None
        self._check_rule(value)
        if self._is_repeated:
            self._last_packed = value, plain
        return plain

    def unpack(self, plain: Any, *frame: Any) -> Any:
        if self._is_repeated:
            return self._unpack_again(plain)
        return self._unpack(plain, *frame)

    def _unpack_again(self, plain: Any) -> Any:
        """True equals 1, and is none: what is remembered was integers, so this must be integers as well."""
        value, known = self._last_unpacked
        if type(plain) is tuple and plain == known and set(map(type, plain)) == {int}:
            return value
        value = self._unpack(plain)
        self._last_unpacked = value, plain
        return value

    def _unpack(self, plain: Any, *frame: Any) -> Any:
        if type(plain) is not tuple or len(plain) != len(self._header):
            size = f"{len(plain)} fields" if type(plain) is tuple else _describe(plain)
            raise FieldError(f"{size}, must be an array of the {len(self._header)} fields of {self.name}")
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
        problem = self.rule(value) if self.rule else None
        if problem:
            raise FieldError(problem)
