"""Builds the network of an existing run, for `gridtrain plan`, from the links that its workers measured.

The links come from the coordinator's status, which arrives over the network, so each figure is checked before
it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count
from gridtrain.status_fields import mapping

if TYPE_CHECKING:
    from gridtrain.core.planning.network_model import NetworkModel
    from gridtrain.core.planning.workload import Workload

MAX_MEMBERS = 2000  # as many as a coordinator admits


@dataclass(frozen=True, slots=True)
class LiveNetwork:
    """The network, the exchange and the compute time of a run.

    Attributes:
        members: the network between the members, in rank order.
        workload: what the run exchanges; None if it is unknown.
        compute_s: the compute time of an optimizer step on the slowest member; None if it is still unknown.
        description: the network in words, for display.
        local_steps: the optimizer steps between two exchanges.
        optimizer: the optimizer, a key of `OPTIMIZER_STATE_COPIES`; "" if it is unknown.
        has_exchange_momentum: whether the exchange applies momentum.
        is_uniform: whether all links are equal.
    """

    members: NetworkModel
    workload: Workload | None
    compute_s: float | None
    description: str
    local_steps: int = 1
    optimizer: str = ""
    has_exchange_momentum: bool = False
    is_uniform: bool = False

    @property
    def workers(self) -> int:
        return self.members.size

    def network(self, size: int) -> NetworkModel:
        """Return the network of `size` workers: the first members, or all members repeated evenly.

        The latency between two copies of a member is that between the member and its nearest neighbour.
        """
        from gridtrain.core.planning.network_model import LinkModel, NetworkModel

        members, count = self.members, self.workers
        if size == count:
            return members
        if size < count:
            return members.reordered(range(size))
        alike = [  # limited only by upload and download
            LinkModel(min(members.link(one, other).alpha_s for other in range(count) if other != one))
            for one in range(count)
        ]
        repeated = [rank * count // size for rank in range(size)]  # copies of a member get adjacent ranks

        def link(a: int, b: int) -> LinkModel:
            one, other = repeated[a], repeated[b]
            return members.link(one, other) if one != other else alike[one]

        return NetworkModel(
            link,
            [members.up_Bps[one] for one in repeated],
            [members.down_Bps[one] for one in repeated],
            members.shared_Bps,
        )


def network_from_status(status: Mapping[str, Any]) -> LiveNetwork:
    """Build the network that a status describes.

    Raises:
        ConfigError: fewer than two workers are training, no link between them has been measured, or the
            status contains an invalid link.
    """
    from gridtrain.core.planning.exchange_facts import local_steps_of, workload_of
    from gridtrain.core.planning.rank_order import LinkMeasurements
    from gridtrain.tools.doctor.speedup_prediction import member_figures

    size, run = status.get("world_size", 0), str(status.get("run", "?"))
    links = status.get("links", [])
    network = None
    if isinstance(size, int) and size >= 2 and isinstance(links, list):
        ranks = [rank.to_bytes(2, "big") * 16 for rank in range(min(size, MAX_MEMBERS))]
        trips: dict[tuple[bytes, bytes], float] = {}
        measured = LinkMeasurements(trips)
        for entry in links:
            a, b, rtt_s, rate_Bps = _entry(entry, len(ranks))
            if rtt_s is not None:
                trips[ranks[a], ranks[b]] = rtt_s
            if rate_Bps is not None:
                measured.record(ranks[a], [(ranks[b], rate_Bps, 0.0)])
        # Not bounded, because the coordinator has compared the reports of both ends.
        network = measured.build_network(ranks, bounded=False)
    if network is None:
        raise ConfigError(
            f'no link between members of "{run}" has been measured yet (training: '
            f"{format_count(size, 'worker')})",
            remedy="try again when at least two workers are training, or use --link or --network instead",
        )
    facts = facts_of(status)
    turn_s, local = max(member_figures(status, "computing_s").values(), default=None), local_steps_of(facts)
    every = local.every if local is not None else 1
    return LiveNetwork(
        network,
        workload_of(facts),
        turn_s / every if turn_s is not None else None,
        f'{network.size} members of "{run}", as measured',
        every,
        _optimizer(facts.get("optimizer", "")),
        _has_momentum(facts.get("exchange", "")),
    )


def facts_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of the run that a status describes."""
    return {str(name): str(text) for name, text in mapping(status.get("facts")).items()}


def _optimizer(described: str) -> str:
    """Return the key in `OPTIMIZER_STATE_COPIES` of an optimizer such as "SGD(lr=0.1, momentum=0.9)".

    If there are several, as in "SGD(lr=0.1) + AdamW(lr=0.1)", the one with the largest state counts.  Returns
    "" if one is not in the table, or if the description is shortened (see `describe_optimizer`).
    """
    from gridtrain.core.stages.stage_cost import OPTIMIZER_STATE_COPIES

    if re.search(r"\.\.\. [0-9a-f]{12}$", described):
        return ""
    names = []
    for part in described.split(" + "):
        name = part.partition("(")[0].lower()
        names.append(name + "-momentum" if name == "sgd" and _has_momentum(part) else name)
    is_known = OPTIMIZER_STATE_COPIES.keys() >= {*names}
    return max(names, key=OPTIMIZER_STATE_COPIES.__getitem__) if is_known else ""


def _has_momentum(described: str) -> bool:
    return re.search(r"\bmomentum=(?!0(\.0)?[,)])", described) is not None


def _entry(entry: Any, size: int) -> tuple[int, int, float | None, float | None]:
    if isinstance(entry, list) and len(entry) == 4:
        a, b, rtt_s, rate_Bps = entry
        if type(a) is int and type(b) is int and 0 <= a < size and 0 <= b < size and a != b:
            return a, b, _number(rtt_s), _number(rate_Bps)
    raise ConfigError(
        f"the status contains the invalid link {entry!r}", remedy="use the coordinator's version of gridtrain"
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else None
