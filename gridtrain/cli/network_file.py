"""Reads a network for `gridtrain plan` from a TOML file of sites and links, or makes one uniform site.

[[site]]
name = "office"
workers = 8                # scaled in proportion if another total number of workers is planned
link = "1Gbit"             # of each worker, in both directions; or `up` and `down` separately
latency = "0.2ms"          # one way, between two workers of this site

[[between]]
sites = ["office", "home"]
link = "100Mbit"           # shared by all traffic between the sites, in each direction; unlimited if left out
latency = "15ms"           # one way
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtrain.errors import ConfigError
from gridtrain.quantities import parse_duration_s
from gridtrain.tools.options.runfile import check_keys

if TYPE_CHECKING:
    from gridtrain.core.planning.network_model import NetworkModel

MAX_WORKERS = 1_000_000


def parse_seconds(text: str, name: str = "") -> float:
    """Parse a duration into seconds.  Raises `ConfigError` if `text` is not a number with a unit of time.

    Args:
        name: the setting that has this duration, for the error message.
    """
    found = parse_duration_s(text)
    if found is None:
        where = f"{name}: " if name else ""
        raise ConfigError(
            f"{where}{text!r} is not a time", remedy='write a number and a unit (us, ms or s), such as "10ms"'
        )
    return found


def read_toml(path: Path, page: str, known: Collection[str]) -> dict[str, Any]:
    """Read a TOML file.  Raises a `ConfigError`, which refers to docs/`page` if the file cannot be read or
    parsed, also for a key that is not in `known`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "lists are nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path}: {reason}", remedy=f"see docs/{page} for the format of the file") from None
    check_keys(f"{path}:", document, known)
    return document


def tables_named(path: Path, document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the tables [[`name`]] of a file; raise `ConfigError` if the key has another value."""
    found = document.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ConfigError(f"{path}: {name} is not a list of tables", remedy=f"write tables: [[{name}]]")
    return found


@dataclass(frozen=True, slots=True)
class NetworkSite:
    """The workers at one site.

    Attributes:
        workers: the number of workers.
        up_Bps, down_Bps: the upload and download rate of each worker.
        alpha_s: the one-way latency between two workers of this site, in seconds.
    """

    name: str
    workers: int
    up_Bps: float
    down_Bps: float
    alpha_s: float


@dataclass(frozen=True, slots=True)
class DescribedNetwork:
    """Sites and the links between them.

    Attributes:
        between: for each pair of sites, by their names, the link's one-way latency in seconds and its rate in
            bytes per second; the rate is None if the link has no limit.
    """

    sites: tuple[NetworkSite, ...]
    between: dict[frozenset[str], tuple[float, float | None]]

    @property
    def workers(self) -> int:
        return sum(site.workers for site in self.sites)

    @property
    def description(self) -> str:
        """The number of workers at each site, as text."""
        return ", ".join(f"{site.workers} at {site.name}" for site in self.sites)

    @property
    def is_uniform(self) -> bool:
        return len(self.sites) == 1

    def network(self, size: int) -> NetworkModel:
        """Return the network of `size` workers, ordered by site; the sites keep their proportions."""
        from gridtrain.core.planning.network_model import LinkModel, NetworkModel

        members = [
            site for site, count in zip(self.sites, self._counts(size), strict=True) for _ in range(count)
        ]
        links = {(site.name, site.name): LinkModel(site.alpha_s) for site in self.sites}
        shared_Bps: dict[str, float] = {}
        for pair, (alpha_s, rate_Bps) in self.between.items():
            for a, b in (sorted(pair), sorted(pair, reverse=True)):
                name = f"{a} to {b}"
                links[a, b] = LinkModel(alpha_s, shared_links=(name,) if rate_Bps is not None else ())
                if rate_Bps is not None:
                    shared_Bps[name] = rate_Bps
        return NetworkModel(
            lambda src, dst: links[members[src].name, members[dst].name],
            [site.up_Bps for site in members],
            [site.down_Bps for site in members],
            shared_Bps,
        )

    def _counts(self, size: int) -> list[int]:
        """Distribute `size` workers among the sites in proportion, by the largest-remainder method."""
        exact = [size * site.workers / self.workers for site in self.sites]
        counts = [int(count) for count in exact]
        most_left = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in most_left[: size - sum(counts)]:
            counts[i] += 1
        return counts


def single_site(link: str, latency: str) -> DescribedNetwork:
    """Return one site of equal workers.  Raises `ConfigError` if an argument is invalid.

    Args:
        link: a worker's rate: "RATE", or "DOWN/UP", the order in which providers state the two rates.
        latency: the one-way latency between two workers, such as "10ms".
    """
    down_Bps, up_Bps = _rates(link)
    return DescribedNetwork((NetworkSite("all", 1, up_Bps, down_Bps, parse_seconds(latency)),), {})


def read_network(path: Path) -> DescribedNetwork:
    """Read a network from a file in the format shown at the top of this module.

    Raises:
        ConfigError: the file cannot be read, or does not describe a network.
    """
    document = read_toml(path, "planning.md", ("site", "between"))
    sites = tuple(_site(path, entry) for entry in tables_named(path, document, "site"))
    names = [site.name for site in sites]
    if not sites or len(set(names)) != len(names):
        raise ConfigError(
            f"{path}: the names of the sites are {names}; they must be unique, and there must be at least "
            "one",
            remedy="add at least one [[site]] and give each site its own name",
        )
    between = dict(_pair(path, names, entry) for entry in tables_named(path, document, "between"))
    for i, a in enumerate(names):
        for b in names[:i]:
            if frozenset((a, b)) not in between:
                raise ConfigError(
                    f'{path}: no [[between]] table specifies the sites "{b}" and "{a}"',
                    remedy=f'add one with sites = ["{b}", "{a}"], latency and, if its rate is limited, link',
                )
    return DescribedNetwork(sites, between)


def _site(path: Path, entry: dict[str, Any]) -> NetworkSite:
    where = f'{path}: site "{entry.get("name", "?")}"'
    check_keys(f"{where}:", entry, ("name", "workers", "link", "up", "down", "latency"))
    workers, name = entry.get("workers", 1), entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: a site has name = {name!r}", remedy="give each site a name in quotes")
    if type(workers) is not int or not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(
            f"{where} has workers = {workers!r}", remedy=f"use an integer from 1 to {MAX_WORKERS}"
        )
    both = entry.get("link")
    if both is not None and ("up" in entry or "down" in entry):
        raise ConfigError(
            f"{where} has both a link and up or down", remedy="specify either a link, or up and down"
        )
    if both is None and ("up" not in entry or "down" not in entry):
        raise ConfigError(f"{where} has no link", remedy="specify either a link, or up and down")
    down_Bps, up_Bps = _rates(str(both) if both is not None else f"{entry['down']}/{entry['up']}", where)
    return NetworkSite(name, workers, up_Bps, down_Bps, parse_seconds(str(entry.get("latency", "0s")), where))


def _pair(
    path: Path, names: list[str], entry: dict[str, Any]
) -> tuple[frozenset[str], tuple[float, float | None]]:
    sites = entry.get("sites")
    where = f"{path}: [[between]] of {sites}"
    named = sites if isinstance(sites, list) and all(isinstance(site, str) for site in sites) else []
    if len(named) != 2 or named[0] == named[1] or not set(named) <= set(names):
        raise ConfigError(
            f"{where} must name two different sites of this file", remedy=f"specify two of {', '.join(names)}"
        )
    check_keys(f"{where}:", entry, ("sites", "link", "latency"))
    rate_Bps = _rates(str(entry["link"]), where)[0] if "link" in entry else None
    return frozenset(named), (parse_seconds(str(entry.get("latency", "0s")), where), rate_Bps)


def _rates(text: str, name: str = "") -> tuple[float, float]:
    """Parse "RATE" or "DOWN/UP"; return (down, up) in bytes per second.  Raises `ConfigError`, see
    `parse_rate`."""
    from gridtrain.network.transport.rate_limiter import parse_rate

    down, slash, up = text.partition("/") if not text.endswith("/s") else (text, "", "")
    down_Bps = parse_rate(down, name)
    return down_Bps, parse_rate(up, name) if slash else down_Bps
