"""Parses and formats sizes, durations and counts ("500MB", "7d", "2 workers"); formats event fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kKmMgGtT]?)(i?)B?")
_PREFIXES = " kmgt"
_MEMBER = re.compile(r"\b(rank \d{1,5}|[0-9a-f]{8})\b")

MAX_NAMES = 3
"""The maximum number of workers whose names a message to people lists; see `list_first`."""

SKIP_REASON = "because a gradient was not finite"
"""The reason for skipping a step, as messages to people state it."""

ALERT_SKIPS = 10
"""After this number of consecutive skipped steps, the status says that nothing is being learned.

A GradScaler skips a few steps at the start of a run, until its scale fits, and single steps later; 10 in a
row divide the scale by 1,024.  With a higher number, the alert would take minutes over slow links."""


def parse_duration_s(text: str) -> float | None:
    """Convert "200us", "10ms", "90s", "15m", "12h" or "7d" to seconds; return None for any other string."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _UNIT_S[match[2]]


def parse_bytes(text: str) -> int | None:
    """Convert "100", "64kB", "1.5GB" (decimal) or "512MiB" (binary) to bytes; return None for any other
    string."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    power = _PREFIXES.index(match[2].lower() or " ")
    scale = (1024.0 if match[3] else 1000.0) ** power
    return round(float(match[1]) * scale)


def shorten(text: str, max_bytes: int) -> str:
    """Return the text; if it exceeds `max_bytes` bytes of UTF-8, cut it, if possible after a word, and append
    "..."."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    head = encoded[: max_bytes - 3].decode(errors="ignore")
    space = head.rfind(" ")
    return (head[:space] if space > len(head) // 2 else head) + "..."


def make_printable(text: str) -> str:
    """Return a text from the network as one line: with spaces instead of line breaks and other blanks, and
    U+FFFD instead of controls, bidirectional overrides and other characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as "1 worker" and "1,200 steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_number(value: float) -> str:
    """Format a number with three significant digits or, from 1,000 on, as an integer: "12.3", "6,083"."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def format_seconds(seconds: float) -> str:
    """Return a time with its unit, for example "12.5 ms" or "3.2 s"."""
    return f"{format_number(seconds * 1e3)} ms" if seconds < 0.9995 else f"{format_number(seconds)} s"


def list_first(items: Sequence[str], most: int) -> str:
    """Return the first `most` items and the number of the others, such as "anna, bert and 3 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def insert_names(text: str, name_of: Callable[[str], str | None]) -> str:
    """Replace ranks ("rank 2") and the first 8 digits of keys by the names of these members.

    Args:
        name_of: returns the name for such a text; None if it is unknown.
    """
    return _MEMBER.sub(lambda found: name_of(found[0]) or found[0], text)


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units, without zeros, such as "6 d 23 h" or "7 d"."""
    minutes, left_s = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (left_s, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"


def format_age(seconds_s: float) -> str:
    """Format how long ago something happened, such as "45 s", "12 min" or "30 h"."""
    if seconds_s < 120:
        return f"{seconds_s:.0f} s"
    return f"{seconds_s / 60:.0f} min" if seconds_s < 7200 else f"{seconds_s / 3600:.0f} h"


def describe_skipped(skipped: int, samples: int, last: int = 0, of: str = "") -> str:
    """Describe how many of a run's samples were in skipped steps.

    Returns "" if no samples were skipped, or if less than 1 % were skipped and `last` is 0.

    Args:
        last: the number of consecutive skipped steps at the end; 0 if they should not be mentioned.
        of: the steps that are counted, such as " of the first 30 steps"; by default all steps of the run.
    """
    if not skipped or (100 * skipped < samples and not last):
        return ""
    among = f", the last {last:,} steps among them" if last else ""
    learned = ""
    if not of and 2 * skipped >= samples:
        learned = f"{'nothing' if skipped == samples else 'little'} was learned: "
    return f"{learned}{skipped:,} of {samples:,} samples{of} were in skipped steps{among}, {SKIP_REASON}"


def format_worker_state(state: str) -> str:
    """Return the glossary's term for a worker's state in the coordinator's status."""
    return {"following": "catching up", "spare": "standby"}.get(state, state)


def format_fields(fields: Mapping[str, object]) -> dict[str, str]:
    """Return the fields of an event in readable form.

    The field `verdict` of a generation is replaced by `open_step`, which says whether the step that was open
    is "committed" or "repeated".
    """
    return dict(
        ("open_step", "committed" if value == "COMMIT" else "repeated")
        if name == "verdict"
        else (name, format_field(value))
        for name, value in fields.items()
    )


def format_field(value: object) -> str:
    """Return a value of an event in readable form: a bool as "yes" or "no", None as "none", a float with
    three decimals, and a list as its items separated by commas."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case float():
            return f"{value:.3f}"
        case list() | tuple():
            return ", ".join(map(format_field, value))
        case _:
            return str(value)


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with three significant digits and a decimal prefix, such as "1.25 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"
