"""Cells: what is measured, and how it is written as text.

"gtopk:values=fp16 P=4 n=25.6M rate=100Mbit density=0.001"           an exchange of gridtrain
"gloo/all_reduce P=4 n=25.6M rate=1Gbit delay=20ms"                  a rival's operation
"dense P=4 n=25.6M rate=1Gbit curve"                                 encrypted
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.config import Exchange
from gridtrain.errors import ConfigError
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.quantities import parse_bytes, parse_duration_s
from gridtrain.tools.bench.exchange_names import parse_exchange

DENSITY = 0.001


class CellError(ValueError):
    """A text is not a cell; the message names the word and what is expected."""


@dataclass(frozen=True, slots=True)
class Link:
    """The network of an exchange.

    Attributes:
        workers: P, each with a link of its own.
        rate: of each link in each direction, such as "100Mbit"; "" is unlimited.
        delay_s: latency from any worker to any other, one way.
    """

    workers: int
    rate: str = ""
    delay_s: float = 0.0

    @property
    def bandwidth_Bps(self) -> float:
        """Bytes per second; 0 is unlimited."""
        return parse_rate(self.rate) if self.rate else 0.0

    def __str__(self) -> str:
        delay = f", {1e3 * self.delay_s:g} ms" if self.delay_s else ""
        return f"P = {self.workers}, {self.rate or 'no limit'}{delay}"


@dataclass(frozen=True, slots=True)
class Cell:
    """An exchange to measure.

    Attributes:
        what: an exchange of gridtrain ("gtopk:values=fp16") or a rival's operation ("gloo/all_reduce").
        n: elements of the vector, float32.
        density: of sparse exchanges: k = max(1, round(density * n)).
        encrypted: whether CURVE is used; rivals have no encryption.
    """

    what: str
    link: Link
    n: int
    density: float = DENSITY
    encrypted: bool = False

    @property
    def rival(self) -> str:
        """The rival's name; "" for gridtrain."""
        return self.what.partition("/")[0] if "/" in self.what else ""

    @property
    def op(self) -> str:
        return self.what.partition("/")[2]

    @property
    def k(self) -> int:
        return max(1, round(self.density * self.n))

    @property
    def exchange(self) -> Exchange:
        """The exchange of a gridtrain cell.  Raises `ConfigError` if there is no such exchange."""
        return parse_exchange(self.what, {"density": str(self.density)})

    @property
    def exchange_text(self) -> str:
        """The exchange for `gridtrain.tools.bench.bench_member`: `what` with the density if it has none."""
        sparse = self.exchange.sparse and "density=" not in self.what
        return self.what + (f"{',' if ':' in self.what else ':'}density={self.density!r}" if sparse else "")

    @property
    def label(self) -> str:
        return self.what + (" CURVE" if self.encrypted else "")

    @property
    def dense(self) -> bool:
        """Whether all elements are exchanged."""
        return not self.exchange.sparse if not self.rival else self.op.startswith("all_reduce")

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        words = [self.what, f"P={self.link.workers}", f"n={self.n}", f"density={self.density!r}"]
        words += [f"rate={self.link.rate}"] if self.link.rate else []
        words += [f"delay={self.link.delay_s!r}s"] if self.link.delay_s else []
        return " ".join(words + (["curve"] if self.encrypted else []))


def parse(text: str) -> Cell:
    """Parse a cell, whose words after the first may be in arbitrary order.

    Raises `CellError`, and `ConfigError` for an unknown exchange.
    """
    what, *words = text.split()
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in values:
            raise CellError(f"{word!r}: {key} is given twice in {text!r}")
        values[key] = value
    encrypted = values.pop("curve", None) is not None
    unknown = values.keys() - {"P", "n", "rate", "delay", "density"}
    if unknown or not {"P", "n"} <= values.keys():
        raise CellError(f"{text!r}: P= and n= are needed; rate=, delay=, density= and curve are possible")
    link = Link(
        workers=_whole("P", values["P"], 2),
        rate=values.get("rate", ""),
        delay_s=seconds(values["delay"]) if "delay" in values else 0.0,
    )
    density = _density(values["density"]) if "density" in values else DENSITY
    cell = Cell(what, link, count(values["n"]), density, encrypted)
    if link.rate:
        try:
            parse_rate(link.rate)
        except ConfigError as error:
            raise CellError(f"rate={link.rate}: {error}") from None
    if cell.rival and encrypted:
        raise CellError(f"{text!r}: rivals are measured in plain mode")
    if not cell.rival:
        cell.exchange  # noqa: B018 - raises if it is invalid
    return cell


def count(text: str) -> int:
    """ "25.6M" is 25,600,000.  Raises `CellError`."""
    found = parse_bytes(text)
    if not found:
        raise CellError(f"{text!r} is not a number of elements such as 25.6M (k, M, G)")
    return found


def seconds(text: str) -> float:
    """ "20ms" is 0.02.  Raises `CellError`."""
    found = parse_duration_s(text)
    if found is None:
        raise CellError(f"{text!r} is not a time such as 20ms or 0.02s")
    return found


def _whole(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise CellError(f"{name}={text}: it must be an integer of at least {least}")
    return int(text)


def _density(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1e-9 <= value <= 1.0:
        raise CellError(f"density={text}: it must be from 1e-09 to 1")
    return value
