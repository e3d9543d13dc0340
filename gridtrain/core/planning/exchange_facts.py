"""Parse what the facts of a run say of its exchange; the only place where that text is read.

    Setup.facts  ("model", "120576 parameters in 4 tensors") --> parameter_count    120576
                 ("exchange", "LocalSteps(every=8, ...)")    --> parse_exchange     Dense, TopK, GTopK or Auto

Behind it an exchange travels as one of the dataclasses of `gridtrain.config`.  Facts are compared for
equality between workers, so their text never changes: `describe()` writes it and this module reads it.
"""

from __future__ import annotations

import re

from gridtrain.config import Auto, Dense, Exchange, GTopK, TopK
from gridtrain.core.messages import Setup
from gridtrain.core.planning.workload import Workload
from gridtrain.errors import ConfigError

OPEN_DENSE = Dense().describe()
"""The script leaves the topology of a dense exchange to the coordinator."""

DIRECT_DENSE = Dense(topology="direct").describe()
"""The coordinator has chosen the direct topology: `MembershipView.exchange` says so to the members."""

_EXCHANGE = re.compile(r"(Dense|TopK|GTopK)\(([^()]*)")
_PARAMETERS = re.compile(r"(\d{1,18}) parameters")


def make_exchange(name: str, options: str) -> Exchange | None:
    """An exchange from "GTopK" and "density=0.01, values=fp16, topology=tree"; None: there is no such
    exchange.

    Only what decides bytes and messages is read: momentum and density warm-up are left at their defaults.
    """
    given = dict(option.strip().partition("=")[::2] for option in options.split(",") if "=" in option)
    topology = given.get("topology")
    try:
        if name.lower() == "dense":
            return Dense(topology or "auto")
        density, values = float(given.get("density", "nan")), given.get("values", "fp16")
        if name.lower() == "topk":
            return TopK(density, values=values) if topology is None else None
        is_gtopk = name.lower() == "gtopk"
        return GTopK(density, values=values, topology=topology or "butterfly") if is_gtopk else None
    except (ConfigError, ValueError):
        return None


def parse_exchange(text: str) -> Exchange | Auto | None:
    """What one round exchanges; of local steps that is the exchange inside.  None: the text is not
    understood."""
    auto = Auto.parse(text)
    if auto is not None:
        return auto
    found = _EXCHANGE.search(text)
    return make_exchange(found[1], found[2]) if found is not None else None


def exchange_of(setup: Setup | None) -> Exchange | Auto | None:
    """The exchange that the script names; `Auto`: the coordinator chooses; None: unknown."""
    return parse_exchange(dict(setup.facts).get("exchange", "")) if setup is not None else None


def parameter_count(setup: Setup | None) -> int:
    """Number of parameters of the model; 0: unknown."""
    found = _PARAMETERS.match(dict(setup.facts).get("model", "")) if setup is not None else None
    return int(found[1]) if found is not None else 0


def workload_of(setup: Setup | None) -> Workload | None:
    """What a run exchanges; None: unknown, or not chosen yet."""
    exchange, parameters = exchange_of(setup), parameter_count(setup)
    if exchange is None or isinstance(exchange, Auto) or parameters < 1:
        return None
    return Workload.of(exchange, parameters)


def parse_workload(name: str, options: str, parameters: int, encrypted: bool = True) -> Workload | None:
    """As `make_exchange`, for a model of that many parameters."""
    exchange = make_exchange(name, options)
    return Workload.of(exchange, parameters, encrypted) if exchange is not None else None


def replace_exchange(setup: Setup, text: str, *, direct: bool) -> tuple[tuple[str, str], ...]:
    """The facts of `setup` with `text` (empty: its own) as exchange; `direct`: of an open dense one."""

    def shown(given: str) -> str:
        named = text or given
        return named.replace(OPEN_DENSE, DIRECT_DENSE, 1) if direct else named

    return tuple((name, shown(value) if name == "exchange" else value) for name, value in setup.facts)
