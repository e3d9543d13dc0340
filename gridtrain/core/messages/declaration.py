"""Defines the decorator that declares a message, and the types of message fields, with their bounds.

A message is a class with the base `Message`, decorated with `message(code)`, which makes it a frozen
dataclass.  Its annotations are the schema: a field is a `bool`, a `float`, an enum, another dataclass, one of
the annotated types at the end of this module, or `T | None`, `tuple[S, T]` or `Annotated[tuple[T, ...],
AtMost(n)]` of these types.  The method `find_problem(self) -> str | None` checks rules that involve several
fields.

The encoding (`gridtrain.network.wire.field_encoding`) and the tables of PROTOCOL.md are derived from these
annotations.
"""

from __future__ import annotations

import re
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform

from gridtrain.quantities import shorten

MESSAGE_TYPES: dict[int, type] = {}
"""Every message class, by its code, which is the first item of the message's header."""


class Message:
    """The base of all messages."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GenerationMessage(Message):
    """The base of the messages that concern one generation, in one term."""

    term: UInt
    generation: UInt


C = TypeVar("C", bound=Message)


@dataclass_transform(frozen_default=True)
def message(code: int) -> Callable[[type[C]], type[C]]:
    """Return a class decorator that makes a class a frozen dataclass and declares it as a message.

    The code must be unique.
    """

    def declare(cls: type[C]) -> type[C]:
        if code in MESSAGE_TYPES:
            raise TypeError(f"{cls.__name__} has the code {code}, the code of {MESSAGE_TYPES[code].__name__}")
        MESSAGE_TYPES[code] = declared = dataclass(frozen=True, slots=True)(cls)
        return declared

    return declare


class FieldError(Exception):
    """Raised for a value that has the wrong type or is outside its bounds.

    `path` names the field, for example "members[3].peer"; each enclosing field prepends its own name.
    """

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
    """A type of field, which checks a value and converts it to and from its plain form.

    In PROTOCOL.md, `name` is the name of the type, and `bounds` is its definition.

    A plain value is an int, float, bool, None, str, bytes, or a tuple of plain values.
    """

    name: str
    bounds: str

    @abstractmethod
    def pack(self, value: Any) -> Any:
        """Check a value that is to be sent, and return its plain form.

        Raises:
            FieldError: the value is out of bounds.
        """

    def unpack(self, plain: Any) -> Any:
        """Check a received plain value and return the value that it represents.

        Raises:
            FieldError: the value is out of bounds.
        """
        return self.pack(plain)


def describe(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


class RangeField(FieldType):
    """A type with a lower and an upper bound; `bounds` describes both."""

    def __init__(self, name: str, low: float, high: float, bounds: str) -> None:
        self.name, self.bounds, self.low, self.high = name, bounds, low, high


class IntField(RangeField):
    def pack(self, value: Any) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise FieldError(f"{describe(value)}; it must be {self.bounds}")
        return value


class BoolField(FieldType):
    name = "bool"
    bounds = "true or false"

    def pack(self, value: Any) -> bool:
        if type(value) is not bool:
            raise FieldError(f"{describe(value)}; it must be {self.bounds}")
        return value


class FloatField(RangeField):
    def pack(self, value: Any) -> float:
        if type(value) is int:  # as in Python, an int is accepted where a float is expected
            value = float(value)
        return self.unpack(value)

    def unpack(self, plain: Any) -> float:
        # The comparison is false for NaN.
        if not isinstance(plain, float) or not self.low <= plain <= self.high:
            raise FieldError(f"{describe(plain)}; it must be {self.bounds}")
        return float(plain)


class AnyFloatField(FieldType):
    """A float that may be infinite or NaN."""

    name, bounds = "number", "a 64-bit float, possibly infinite or NaN"

    def pack(self, value: Any) -> float:
        return self.unpack(float(value) if type(value) is int else value)

    def unpack(self, plain: Any) -> float:
        if type(plain) is not float:
            raise FieldError(f"{describe(plain)}; it must be {self.bounds}")
        return plain


class BytesField(RangeField):
    def pack(self, value: Any) -> bytes:
        if type(value) is not bytes or not self.low <= len(value) <= self.high:
            size = f"{len(value)} bytes" if type(value) is bytes else describe(value)
            raise FieldError(f"{size}; it must be {self.bounds}")
        return value


class TextField(FieldType):
    """A UTF-8 string without control characters, because it is printed on terminals."""

    _forbidden = re.compile(r"[\x00-\x1f\x7f-\x9f]")

    def __init__(self, name: str, max_bytes: int, bounds: str) -> None:
        self.name, self.bounds, self.max_bytes = name, bounds, max_bytes

    def pack(self, value: Any) -> str:
        if type(value) is not str:
            raise FieldError(f"{describe(value)}; it must be {self.bounds}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise FieldError(f"{describe(value)}; it must be valid UTF-8") from None
        found = self._forbidden.search(value)
        if size > self.max_bytes or found:
            what = f", with U+{ord(found[0]):04X}" if found else ""
            raise FieldError(f"{size} bytes, {reprlib.repr(value)}{what}; it must be {self.bounds}")
        return value


class NameField(TextField):
    """A string without invisible characters, because people tell workers apart by their names."""

    # A list, because `unicodedata` differs between Python versions: controls, blanks except the space, code
    # points that Unicode calls default-ignorable, and the format controls of hieroglyphs.
    _forbidden = re.compile(
        "[\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f"
        "\u205f-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
        "\U00013430-\U00013442\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff]|^ | $"
    )


class ReasonField(TextField):
    """A string that explains something to the user.

    `pack` shortens a string that is too long and replaces control characters instead of raising `FieldError`,
    so that no reason crashes its sender.
    """

    _forbidden = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

    def pack(self, value: Any) -> str:
        if type(value) is not str:
            raise FieldError(f"{describe(value)}; it must be {self.bounds}")
        return shorten(self._forbidden.sub(" ", value), self.max_bytes)

    def unpack(self, plain: Any) -> str:
        return super().pack(plain)


class WordField(FieldType):
    def __init__(self, name: str, *words: str) -> None:
        self.name, self.words = name, frozenset(words)
        self.bounds = "one of " + ", ".join(words)

    def pack(self, value: Any) -> str:
        if type(value) is not str or value not in self.words:
            raise FieldError(f"{describe(value)}; it must be {self.bounds}")
        return value


class PayloadField(FieldType):
    """A payload: the last field of its message, which is not in the header, but forms frame 1."""

    name = "frame 1"
    bounds = "0 .. 64 MiB, opaque here"

    def pack(self, value: Any) -> Any:
        raise NotImplementedError("a payload is not a part of the header")


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotation that limits the number of items in a variable-length tuple."""

    items: int


# -- annotated types -------------------------------------------------------------------------------

BOOL = BoolField()
FLOAT = FloatField("float", -sys.float_info.max, sys.float_info.max, "a finite 64-bit float")
NAME = NameField(
    "name", 64, "at most 64 bytes of UTF-8 without control or invisible characters or spaces at its ends"
)
ADDRESS = TextField("address", 128, "at most 128 bytes of UTF-8 without control characters")

UInt = Annotated[int, IntField("uint", 0, 2**63 - 1, "an integer 0 .. 2^63-1 (SQLite's maximum)")]
Count = Annotated[int, IntField("count", 0, 2**31 - 1, "an integer 0 .. 2^31-1")]
Positive = Annotated[int, IntField("positive", 1, 2**31 - 1, "an integer 1 .. 2^31-1")]
AppliedStep = Annotated[
    int, IntField("applied", -1, 2**63 - 1, "an integer -1 .. 2^63-1, a step; -1: no step yet")
]
MAX_STAGES = 1024
"""Maximum number of stages of a model."""

StageCount = Annotated[int, IntField("stages", 1, MAX_STAGES, f"an integer 1 .. {MAX_STAGES}")]
LayerIndex = Annotated[int, IntField("layer", 0, 2**20, "an integer 0 .. 2^20, a layer of the model")]
StageBounds = Annotated[tuple[LayerIndex, ...], AtMost(MAX_STAGES + 1)]
SourceRank = Annotated[
    int,
    IntField("source", -1, 2**31 - 1, "an integer -1 .. 2^31-1, a rank; -1: the lowest that holds the state"),
]
WHOLE_SHARE = 256
"""The value of `Member.entries_share` with which a member selects all k entries of a sparse payload."""

EntriesShare = Annotated[int, IntField("fraction", 1, WHOLE_SHARE, "an integer 1 .. 256, in 256ths")]
Rate = Annotated[float, FloatField("rate", 0.0, 1e12, "a 64-bit float 0 .. 10^12, bytes per second")]
Seconds = Annotated[float, FloatField("seconds", 0.0, 1e6, "a 64-bit float 0 .. 10^6")]
Lifetime = Annotated[float, FloatField("lifetime", 0.0, 1e10, "a 64-bit float 0 .. 10^10, seconds")]
Flops = Annotated[float, FloatField("flops", 0.0, 1e18, "a 64-bit float 0 .. 10^18, operations per second")]
Factor = Annotated[float, FloatField("factor", 0.0, 1e6, "a 64-bit float 0 .. 10^6, no unit")]
PeerId = Annotated[bytes, BytesField("peer", 32, 32, "exactly 32 bytes, a public key")]
"""A peer's public key, which identifies the peer; addresses and routing ids never do."""

Proof = Annotated[bytes, BytesField("proof", 8, 8, "exactly 8 bytes")]
Digest = Annotated[bytes, BytesField("digest", 0, 64, "0 .. 64 bytes")]
AnyFloat = Annotated[float, AnyFloatField()]
Name = Annotated[str, NAME]
Address = Annotated[str, ADDRESS]
Text = Annotated[str, TextField("text", 512, "at most 512 bytes of UTF-8 without control characters")]
Reason = Annotated[
    str, ReasonField("reason", 512, "at most 512 bytes of UTF-8 without control characters except newline")
]
RunStateWord = Annotated[str, WordField("state", "waiting", "training", "paused", "finished")]
Payload = Annotated[Any, PayloadField()]
