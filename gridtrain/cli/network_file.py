"""A network as people describe it: one link for all, or a TOML file of sites and the links between them.
[[site]]
name = "office"
workers = 8                # for another total each site gets its proportion
link = "1Gbit"             # of each worker, both ways; or up = and down =
latency = "0.2ms"          # one way, between two workers of this site

[[between]]
sites = ["office", "home"]
link = "100Mbit"           # shared by all traffic between them, each way; left out: no limit
latency = "15ms"           # one way
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtrain.errors import ConfigError

if TYPE_CHECKING:
    from gridtrain.core.planning.network_model import LinkModel, NetworkModel

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_UNITS_s = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_WORKERS = 1_000_000


def parse_seconds(text: str) -> float:
    """Seconds from "0.5s", "10ms", "200us".

    Raises:
        ConfigError: the text is not a time.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a time", remedy='write a number and us, ms or s, such as "10ms"')
    return float(match[1]) * _UNITS_s[match[2]]


@dataclass(frozen=True, slots=True)
class NetworkSite:
    """Workers at one place."""

    name: str
    workers: int
    up_Bps: float
    down_Bps: float
    alpha_s: float


@dataclass(frozen=True, slots=True)
class DescribedNetwork:
    """Sites, and for each pair of them the latency and the rate (None: no limit) of the link between them."""

    sites: tuple[NetworkSite, ...]
    between: dict[frozenset[str], tuple[float, float | None]]

    @property
    def workers(self) -> int:
        return sum(site.workers for site in self.sites)

    @property
    def description(self) -> str:
        """For people."""
        return ", ".join(f"{site.workers} at {site.name}" for site in self.sites)

    @property
    def is_uniform(self) -> bool:
        return len(self.sites) == 1

    def network(self, size: int) -> NetworkModel:
        """The network of `size` workers, from each site in proportion; site after site."""
        from gridtrain.core.planning.network_model import LinkModel, NetworkModel

        members = [
            site for site, count in zip(self.sites, self._counts(size), strict=True) for _ in range(count)
        ]
        links = {(site.name, site.name): LinkModel(site.alpha_s) for site in self.sites}
        shared_Bps: dict[str, float] = {}
        for pair, (alpha_s, rate_Bps) in self.between.items():
            for a, b in (sorted(pair), sorted(pair, reverse=True)):
                links[a, b] = _between(a, b, alpha_s, rate_Bps)
                if rate_Bps is not None:
                    shared_Bps[f"{a} to {b}"] = rate_Bps
        return NetworkModel(
            lambda src, dst: links[members[src].name, members[dst].name],
            [site.up_Bps for site in members],
            [site.down_Bps for site in members],
            shared_Bps,
        )

    def _counts(self, size: int) -> list[int]:
        """Workers of each site, by the largest remainders."""
        exact = [size * site.workers / self.workers for site in self.sites]
        counts = [int(count) for count in exact]
        most_left = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in most_left[: size - sum(counts)]:
            counts[i] += 1
        return counts


def _between(a: str, b: str, alpha_s: float, rate_Bps: float | None) -> LinkModel:
    from gridtrain.core.planning.network_model import LinkModel

    return LinkModel(alpha_s, shared_links=(f"{a} to {b}",) if rate_Bps is not None else ())


def single_site(link: str, latency: str) -> DescribedNetwork:
    """Equal workers at one site; `link` is "RATE", or "DOWN/UP" as providers write it."""
    down_Bps, up_Bps = _rates(link)
    return DescribedNetwork((NetworkSite("all", 1, up_Bps, down_Bps, parse_seconds(latency)),), {})


def read_network(path: Path) -> DescribedNetwork:
    """The network of a file as shown at the top of this module.

    Raises:
        ConfigError: the file cannot be read, or describes no network.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(
            f"{path}: lists are nested too deeply", remedy="write it as docs/planning.md shows"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", remedy="write it as docs/planning.md shows") from None
    sites = tuple(_site(path, entry) for entry in _tables(path, document, "site"))
    names = [site.name for site in sites]
    if not sites or len(set(names)) != len(names):
        raise ConfigError(
            f"{path}: sites are {names}", remedy="give at least one [[site]], each with its own name"
        )
    between = dict(_pair(path, names, entry) for entry in _tables(path, document, "between"))
    for i, a in enumerate(names):
        for b in names[:i]:
            if frozenset((a, b)) not in between:
                raise ConfigError(
                    f'{path}: no link is given between "{b}" and "{a}"',
                    remedy=f'add [[between]] with sites = ["{b}", "{a}"] and a latency; a link if it is slow',
                )
    return DescribedNetwork(sites, between)


def _tables(path: Path, document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    unknown = set(document) - {"site", "between"}
    found = document.get(name, [])
    if unknown or not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        what = f"unknown {', '.join(sorted(unknown))}" if unknown else f"[{name}]"
        raise ConfigError(f"{path}: {what}", remedy="a network file has [[site]] and [[between]] only")
    return found


def _site(path: Path, entry: dict[str, Any]) -> NetworkSite:
    known = {"name", "workers", "link", "up", "down", "latency"}
    where = f'{path}: site "{entry.get("name", "?")}"'
    if unknown := set(entry) - known:
        raise ConfigError(f"{where} has {sorted(unknown)}", remedy=f"a site has {', '.join(sorted(known))}")
    workers, name = entry.get("workers", 1), entry.get("name")
    if not isinstance(name, str) or not name or type(workers) is not int or not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"{where} has {workers!r} workers", remedy="give it a name, and workers >= 1")
    both = entry.get("link")
    if both is not None and ("up" in entry or "down" in entry):
        raise ConfigError(f"{where} has a link, and up or down", remedy="give it a link, or up and down")
    if both is None and ("up" not in entry or "down" not in entry):
        raise ConfigError(f"{where} has no link", remedy="give it a link, or up and down")
    down_Bps, up_Bps = _rates(str(both)) if both is not None else _rates(f"{entry['down']}/{entry['up']}")
    return NetworkSite(name, workers, up_Bps, down_Bps, parse_seconds(str(entry.get("latency", "0s"))))


def _pair(
    path: Path, names: list[str], entry: dict[str, Any]
) -> tuple[frozenset[str], tuple[float, float | None]]:
    sites = entry.get("sites")
    where = f"{path}: [[between]] of {sites}"
    named = sites if isinstance(sites, list) and all(isinstance(site, str) for site in sites) else []
    if len(named) != 2 or named[0] == named[1] or not set(named) <= set(names):
        raise ConfigError(where, remedy=f"sites must be two of {', '.join(names)}")
    if unknown := set(entry) - {"sites", "link", "latency"}:
        raise ConfigError(f"{where} has {sorted(unknown)}", remedy="it has sites, link and latency")
    rate_Bps = _rates(str(entry["link"]))[0] if "link" in entry else None
    return frozenset(named), (parse_seconds(str(entry.get("latency", "0s"))), rate_Bps)


def _rates(text: str) -> tuple[float, float]:
    """(down, up) in bytes per second."""
    from gridtrain.network.transport.rate_limiter import parse_rate

    down, slash, up = text.partition("/") if not text.endswith("/s") else (text, "", "")
    down_Bps = parse_rate(down)
    return down_Bps, parse_rate(up) if slash else down_Bps
