"""The only module that parses a run's exchange and number of parameters from the text of its facts.

    Setup.facts  ("model", "120576 parameters in 4 tensors") --> parameter_count    120576
                 ("exchange", "LocalSteps(every=8, ...)")    --> parse_exchange     Dense, TopK, GTopK or Auto

All other code uses the dataclasses of `gridtrain.config`.  Workers' facts are compared for equality, so their
text never changes: `describe()` writes it and this module reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from gridtrain.config import AUTO_TEXT, Auto, Dense, Exchange, GTopK
from gridtrain.core.messages import Setup
from gridtrain.core.planning.workload import Workload
from gridtrain.errors import ConfigError

DIRECT_DENSE = Dense(topology="direct").describe()
"""The value of `MembershipView.exchange` if the script specifies a dense exchange and the coordinator has
chosen the direct topology for it."""

DIRECT_GTOPK = "GTopK(topology=direct)"
"""The corresponding value for a gTop-k exchange."""

EXCHANGE_CLASSES: dict[str, type[Any]] = {each.__name__.lower(): each for each in get_args(Exchange)}
"""The class of each exchange, by its name in lower case."""

_EXCHANGE = re.compile(rf"\b({'|'.join(each.__name__ for each in EXCHANGE_CLASSES.values())})\(([^()]*)")
_LOCAL_STEPS = re.compile(r"LocalSteps\(every=(\d{1,9}),.*?(?:, overlap=(True|\d{1,9}))?\)")
_PARAMETERS = re.compile(r"(\d{1,18}) parameters")


def make_exchange(name: str, options: str) -> Exchange | None:
    """Make an exchange from its name and options.

    The name is, for example, "GTopK", and the options are "density=0.01, values=fp16, topology=tree".  Only
    the options that determine bytes and messages are read; momentum and density warm-up keep their defaults.
    Returns None if there is no such exchange or an option is invalid.
    """
    given = dict(option.strip().partition("=")[::2] for option in options.split(",") if "=" in option)
    try:
        made = EXCHANGE_CLASSES[name.lower()]
        read: dict[str, Any] = {key: given[key] for key in ("values", "topology") if key in given}
        if hasattr(made, "density"):
            read["density"] = float(given["density"])
        exchange: Exchange = made(**read)
        return exchange
    except (ConfigError, KeyError, TypeError, ValueError):  # TypeError: the exchange has no such option
        return None


def parse_exchange(text: str) -> Exchange | Auto | None:
    """Parse the text of an exchange; if it describes local steps, return the exchange inside `LocalSteps`.

    Returns None if the text cannot be parsed.
    """
    if (auto := AUTO_TEXT.search(text)) is not None:
        return Auto.parse(auto[0])
    found = _EXCHANGE.search(text)
    return make_exchange(found[1], found[2]) if found is not None else None


def exchange_of(facts: Mapping[str, str]) -> Exchange | Auto | None:
    """Return the exchange that the script specifies.

    Returns `Auto` if the coordinator chooses the exchange, and None if the exchange is unknown.
    """
    return parse_exchange(facts.get("exchange", ""))


class LocalStepsFacts(NamedTuple):
    """The local steps of a run.

    Attributes:
        every: the number of optimizer steps in one step of the run.
        overlapped: the number of local steps with which an exchange overlaps; 0 without overlap.
    """

    every: int
    overlapped: int


def local_steps_of(facts: Mapping[str, str]) -> LocalStepsFacts | None:
    """Return the local steps that the script specifies; None if it does not use `LocalSteps`."""
    found = _LOCAL_STEPS.fullmatch(facts.get("exchange", ""))
    if found is None:
        return None
    every = max(1, int(found[1]))
    return LocalStepsFacts(every, every if found[2] == "True" else min(every, int(found[2] or 0)))


def parameter_count(facts: Mapping[str, str]) -> int:
    """Return the model's number of parameters; 0 if it is unknown."""
    found = _PARAMETERS.match(facts.get("model", ""))
    return int(found[1]) if found is not None else 0


def workload_of(facts: Mapping[str, str]) -> Workload | None:
    """Return the workload that the facts of a run describe.

    Returns None if the exchange or the number of parameters is unknown, or if no exchange has been chosen
    yet.
    """
    exchange, parameters = exchange_of(facts), parameter_count(facts)
    if exchange is None or isinstance(exchange, Auto) or parameters < 1:
        return None
    return Workload.of(exchange, parameters)


def as_direct(exchange: Exchange | Auto | None) -> Dense | GTopK | None:
    """Return the exchange with the direct topology; None if the coordinator may not choose its topology."""
    if isinstance(exchange, Dense | GTopK) and exchange.topology == "auto":
        return replace(exchange, topology="direct")
    return None


def direct_marker(exchange: Exchange | Auto | None) -> str:
    """Return the text in `MembershipView.exchange` that gives the script's exchange the direct topology."""
    return DIRECT_GTOPK if isinstance(exchange, GTopK) else DIRECT_DENSE


def name_direct(text: str) -> str:
    """Return the text of an exchange with the direct topology added to the first `Dense` or `GTopK` that has
    no topology."""
    return re.sub(r"(?:Dense\((?=values=|\))|GTopK\((?![^)]*topology=))", _name_direct, text, count=1)


def _name_direct(found: re.Match[str]) -> str:
    separator = "" if found.string[found.end()] == ")" else ", "
    return f"{found[0]}topology=direct{separator}"


def replace_exchange(setup: Setup, text: str, *, direct: bool) -> tuple[tuple[str, str], ...]:
    """Return the facts of `setup` with another exchange.

    Args:
        text: the chosen exchange, which replaces the `Auto` in the script's exchange; empty to replace
            nothing.
        direct: whether to add the direct topology to an exchange that has no topology.
    """

    def shown(given: str) -> str:
        named = AUTO_TEXT.sub(lambda _: text, given) if text else given
        return name_direct(named) if direct else named

    return tuple((name, shown(value) if name == "exchange" else value) for name, value in setup.facts)
