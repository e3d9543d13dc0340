"""Parses names of exchanges on a command line, such as `gtopk:density=0.001,values=fp32`.

    "dense"                           Dense()
    "gtopk:density=0.001,values=fp32" GTopK(density=0.001, values="fp32")

The options are the fields of the exchange's class in `gridtrain.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from gridtrain.config import Exchange
from gridtrain.core.planning.exchange_facts import EXCHANGE_CLASSES
from gridtrain.errors import ConfigError


def parse_exchange(text: str, defaults: Mapping[str, str] | None = None) -> Exchange:
    """Return the exchange that `text` names.

    Args:
        defaults: values for options that the text does not set; options that this exchange does not have are
            ignored.

    Raises:
        ConfigError: the exchange or an option is unknown, or a value is invalid.
    """
    name, _, rest = text.strip().partition(":")
    family = EXCHANGE_CLASSES.get(name.strip().lower())
    if family is None:
        raise ConfigError(
            f"there is no exchange {name!r}", remedy=f"use one of {', '.join(EXCHANGE_CLASSES)}"
        )
    known = {field.name: field for field in fields(family)}
    given = {key: value for key, value in (defaults or {}).items() if key in known}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            has = f"with {', '.join(known)}" if known else "without options"
            raise ConfigError(
                f"{word!r} does not set an option of {name}",
                remedy=f"use {name} {has}, written as option=value",
            )
        given[key] = value
    made: Exchange = family(**{key: _value(known[key].default, key, value) for key, value in given.items()})
    return made


def _value(default: object, key: str, text: str) -> object:
    """Convert the text of option `key` to the type of its default.  Raises `ConfigError` if that is not
    possible."""
    try:
        match default:
            case bool():
                return {"yes": True, "true": True, "no": False, "false": False}[text.lower()]
            case int() | float():
                return type(default)(text)
            case str():
                return text
    except (KeyError, ValueError):
        wanted = {bool: "yes or no", int: "an integer"}.get(type(default), "a number")
        raise ConfigError(
            f"{key}={text} is invalid; it must be {wanted}", remedy=f"use {key}={default}, for example"
        ) from None
    raise ConfigError(f"{key}={text}: this option cannot be given as text", remedy="leave it at its default")
