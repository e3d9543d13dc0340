"""The exchanges that a script can choose (`Dense`, ...), the settings of `join`, the port, and timeouts.

This module imports neither torch nor sockets.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from gridtrain.errors import ConfigError

DEFAULT_PORT = 7700
ENV_PREFIX = "GRIDTRAIN_"
_KEY = re.compile(r"[0-9a-f]{64}")


# -- exchanges: how gradients are shared -----------------------------------------------------------

WAITS = ("all", "auto")
"""The values of `wait`: "all" waits for workers whose training loops have stalled; "auto" lets steps commit
without them."""

BASES = ("exact", "any")
"""The values of `base`: "exact" requires the same frozen parameters on all workers; "any" does not."""

VALUES = ("fp16", "fp32", "bf16", "int8", "int4", "int2")
"""The encodings of the values in a sparse exchange; "int2" is allowed only if values are rounded once, in
`TopK` and `GTopK(topology="star")`."""

DENSE_VALUES = ("fp32", "bf16", "int8")
"""The encodings of the values in a dense exchange."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Dense all-reduce of gradients: each step exchanges every element.

    Attributes:
        topology: "auto", to let the coordinator select "direct" for small models on similar links and
            "ring" otherwise; "ring" (Baidu, 2017); "direct", in which all members are connected to each other
            and each sums one chunk, so that an exchange takes two hops; or "star", in which all members send
            to rank 0, as to a parameter server.
        values: how the elements are sent: as "fp32", or rounded to "bf16" (2 bytes) or "int8" (1 byte, plus 2
            bytes for every 256 elements).  A worker that rounds adds its rounding errors to its next
            gradient.
    """

    topology: str = "auto"
    values: str = "fp32"
    sparse: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_choice("topology of Dense", self.topology, ("auto", "ring", "direct", "star"), "topology")
        _check_choice("values of Dense", self.values, DENSE_VALUES, "encoding of a dense exchange")

    def describe(self) -> str:
        given = ("topology", self.topology, "auto"), ("values", self.values, "fp32")
        return f"Dense({', '.join(f'{name}={value}' for name, value, usual in given if value != usual)})"


@dataclass(frozen=True, slots=True)
class _Sparse:
    """The options that both sparse exchanges share.

    Attributes:
        density: rho, the share of elements sent: k = max(1, round(rho * n)) of n elements.  With 0.01,
            small models can lose accuracy; `Auto.density_of` proposes a density for a number of parameters.
        momentum: the factor of DGC momentum correction and momentum factor masking (arXiv 1712.01887,
            sections 3.2 and 3.3): the momentum of an element is set to 0 when the element is sent, so
            momentum has less effect at a higher density.  0 disables both.
        values: the encoding of values: "fp16", "fp32", "bf16", "int8", "int4" or "int2"; rounding errors are
            added to the residual.  "int2" is for `TopK` and `GTopK(topology="star")`, which round once.
        warmup: the densities of the first steps as ((until_step, density), ...), in ascending order of
            until_step; each density applies to the steps before its until_step.  The density depends only on
            the global step, so that a worker that joins late uses the same density as the others.
        chunk: the length of the chunks; the largest elements of each chunk are selected (SparseLoCo, arXiv
            2508.15706).  0 selects the largest elements overall, as merges of `GTopK` always do.
        residual_decay: the share of the residual that is dropped after each committed step, as in SparseLoCo,
            whose beta is 1 - residual_decay; 0 drops nothing.  Dropped values are lost; `gridtrain status
            --json` shows the sum of their magnitudes as decayed_mass.  The residual of a worker that is
            absent from a step does not decay.
    """

    density: float = 0.01
    momentum: float = 0.0
    values: str = "fp16"
    warmup: tuple[tuple[int, float], ...] = field(default=())
    chunk: int = field(default=0, kw_only=True)
    residual_decay: float = field(default=0.0, kw_only=True)
    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        warmup = self.warmup
        if not isinstance(warmup, tuple | list) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in warmup
        ):
            raise ConfigError(
                f"warmup is {warmup!r}; it must be a tuple of pairs (until_step, density)", remedy=_TRY_WARMUP
            )
        for name, value in (("density", self.density), *(("warmup density", d) for _, d in warmup)):
            _check_number(name, value, "> 0 and <= 1", lambda x: 0.0 < x <= 1.0, "try density=0.01")
        _check_number("momentum", self.momentum, ">= 0 and < 1", lambda x: 0.0 <= x < 1.0, "try momentum=0.9")
        _check_choice("values", self.values, VALUES, "encoding")
        bounds = [until for until, _ in warmup]
        for until in bounds:
            _check_number("warmup step", until, "> 0", lambda x: x > 0, _TRY_WARMUP, whole=True)
        if bounds != sorted(set(bounds)):
            raise ConfigError(f"warmup steps are {bounds}; they must be ascending", remedy=_TRY_WARMUP)
        _check_number("chunk", self.chunk, ">= 0", lambda x: x >= 0, "use chunk=0", whole=True)
        least = min(self.density, *(density for _, density in self.warmup), 1.0)
        selected = self.chunk * least
        if self.chunk != 0 and selected < 2.0:
            raise ConfigError(
                f"chunk is {self.chunk}; the density {least} selects {selected:g} elements of each chunk, "
                "but at least 2 are needed, so that no chunk is left out",
                remedy=f"use chunk={math.ceil(2 / least)} or more, or chunk=0",
            )
        remedy = "use residual_decay=0.0, or 0.05 as in SparseLoCo"
        _check_number("residual_decay", self.residual_decay, ">= 0 and < 1", lambda x: 0.0 <= x < 1.0, remedy)

    def density_at(self, step: int) -> float:
        """Return the density of global step `step`."""
        for until_step, density in self.warmup:
            if step < until_step:
                return density
        return self.density

    def k_at(self, step: int, n: int, share: float = 1.0) -> int:
        """Return the number of entries that a worker selects out of `n` in step `step`.

        Args:
            share: the fraction of the usual number that this worker selects (`Member.entries_share`); it
                always selects at least one entry, and at least one for each chunk.
        """
        k = min(n, max(1, round(self.density_at(step) * n)))
        if share >= 1.0:
            return k
        return min(k, max(1, -(-n // self.chunk) if self.chunk else 1, round(share * k)))

    def describe(self) -> str:
        options = {"chunk": self.chunk, "residual_decay": self.residual_decay, "warmup": self.warmup}
        rest = "".join(f", {name}={value}" for name, value in options.items() if value)
        name = type(self).__name__
        return f"{name}(density={self.density}, momentum={self.momentum}, values={self.values}{rest})"


@dataclass(frozen=True, slots=True)
class TopK(_Sparse):
    """All-gather of the k largest elements of every worker; their sum has up to k entries for each worker."""

    topology: ClassVar[str] = "all-gather"


@dataclass(frozen=True, slots=True)
class GTopK(_Sparse):
    """Global top-k: merges the entries of all workers, and keeps about k of them (after arXiv 1901.04359).

    Attributes:
        topology: "butterfly", in which P members merge pairwise and each sends O(k log P) entries; "direct",
            in which each member merges a part of the indices for all members, and sends O(k) entries;
            "tree", as in the paper; or "star", in which all members send to rank 0, which merges once.  With
            "auto", the coordinator chooses between butterfly and direct.
    """

    topology: str = "auto"

    def __post_init__(self) -> None:
        _Sparse.__post_init__(self)  # super() does not work in a dataclass with slots
        known = ("auto", "butterfly", "direct", "tree", "star")
        _check_choice("topology of GTopK", self.topology, known, "topology")
        if self.values == "int2" and self.topology != "star":
            raise ConfigError(
                f'values is "int2", but GTopK(topology="{self.topology}") rounds at each merge, and two bits '
                "are too coarse for that",
                remedy='use values="int4", or an exchange that rounds once: TopK(values="int2") or '
                'GTopK(values="int2", topology="star")',
            )

    def describe(self) -> str:
        text = _Sparse.describe(self)
        return text if self.topology == "auto" else f"{text[:-1]}, topology={self.topology})"


Exchange = Dense | TopK | GTopK

AUTO_TEXT = re.compile(r"auto\(([^()]*)\)")
"""Matches the text that `Auto.describe` returns; the group captures the options in parentheses."""

LOCAL_STEPS_DENSITY = 0.03
"""The density of sparse exchanges in proposed local steps; docs/local-steps.md has measurements."""

_LOCAL_DENSITIES = (0.1, LOCAL_STEPS_DENSITY, 0.01)
_LEARNS = ((120_576, 0.05), (25_600_000, 0.001))


@dataclass(frozen=True, slots=True)
class Auto:
    """Lets the coordinator choose `Dense()`, `GTopK` or `TopK` by the measured speed of links and workers.

    The coordinator may change its choice during the run.  A dense step that follows sparse steps also sends
    their residuals.

    Attributes:
        density: the density of the sparse exchanges; None derives it from the model's size (see
            `density_of`), or within `LocalSteps` lets the coordinator choose 0.1, 0.03 or 0.01.
        values: the encoding of the sparse exchanges' values.
        sparse: whether sparse exchanges may be chosen; set it to False for an optimizer that converges poorly
            with them.
        computing: the share of their time that workers should spend computing.  The densest exchange that
            achieves this is chosen, or the fastest exchange if none does.  A dense exchange is also chosen if
            its steps take at most 10 % longer than the steps of the fastest exchange.
    """

    density: float | None = None
    values: str = "fp16"
    sparse: bool = True
    computing: float = 0.9
    topology: ClassVar[str] = "ring"
    """The topology that is used before an exchange is chosen."""

    def __post_init__(self) -> None:
        _check_flag("sparse", self.sparse)
        self.exchanges(1)  # checks density and values
        remedy = "use computing=0.9"
        _check_number("computing", self.computing, "> 0 and < 1", lambda x: 0.0 < x < 1.0, remedy)

    @staticmethod
    def density_of(parameters: int) -> float:
        """Return the density for a model with this many parameters, interpolated linearly in the
        logarithms between two measured densities: 0.05 for 120,576 parameters (the demo's GPT, which does
        not learn with 0.001) and 0.001 for 25.6 million (ResNet-50 in arXiv 1901.04359).  Smaller and larger
        models get the nearer of the two densities."""
        (small, dense), (large, thin) = _LEARNS
        if parameters <= small:
            return dense
        if parameters >= large:
            return thin
        part = math.log(parameters / small) / math.log(large / small)
        return float(f"{dense * (thin / dense) ** part:.2g}")

    def exchanges(self, parameters: int, *, local_steps: bool = False) -> tuple[Exchange, ...]:
        """Return the exchanges that may be chosen for a model with this many parameters, densest first.

        Args:
            local_steps: whether parameter changes (`LocalSteps`) are exchanged instead of gradients.
        """
        densities: tuple[float, ...] = ()
        if self.sparse and self.density is not None:
            densities = (self.density,)
        elif self.sparse:
            densities = _LOCAL_DENSITIES if local_steps else (self.density_of(parameters),)
        kinds = GTopK, TopK
        return Dense(), *(kind(density, values=self.values) for density in densities for kind in kinds)

    def describe(self) -> str:
        """Return a string that `parse` accepts."""
        if not self.sparse:
            return "auto(dense alone)"
        density = f"density={self.density}, " if self.density is not None else ""
        computing = f", computing={self.computing}" if self.computing != 0.9 else ""
        return f"auto({density}values={self.values}{computing})"

    @classmethod
    def parse(cls, text: str) -> Auto | None:
        """Parse the result of `describe`; return None for any other string."""
        found = AUTO_TEXT.fullmatch(text)
        if found is None:
            return None
        if found[1] == "dense alone":
            return cls(sparse=False)
        said = dict(option.strip().partition("=")[::2] for option in found[1].split(",") if "=" in option)
        try:
            density = float(said["density"]) if "density" in said else None
            computing = float(said.get("computing", 0.9))
            return cls(density, said.get("values", "fp16"), computing=computing)
        except (ConfigError, ValueError):
            return None


def exchange_of(given: Exchange | LocalSteps | Auto | str | None) -> Exchange | LocalSteps | Auto:
    """Return the exchange that the argument `exchange=` of `Grid.optimizer` stands for: `GTopK()` for None,
    `Auto()` for "auto", and otherwise the argument itself.

    Raises `ConfigError` if the argument is another string, or is not an exchange, `LocalSteps` or `Auto`.
    """
    if given is None:
        return GTopK()
    if given == "auto":
        return Auto()
    if isinstance(given, str):
        raise ConfigError(
            f'exchange is "{given}", which is not a known name',
            remedy='use exchange="auto", or an exchange such as GTopK()',
        )
    if not isinstance(given, Exchange | LocalSteps | Auto):
        is_kind = isinstance(given, type) and issubclass(given, Exchange | Auto)
        text = given.__name__ if isinstance(given, type) else repr(given)
        raise ConfigError(
            f"exchange is {text}, which is not an exchange",
            remedy=f"call it: {text}()"
            if is_kind
            else 'pass one, such as exchange=gridtrain.GTopK(density=0.01), or exchange="auto"',
        )
    return given


@dataclass(frozen=True, slots=True)
class Overlap:
    """Exchanges gradients during the backward pass: in buckets, the last layers first.

    Use the same settings on all workers.  A bucket should have at least alpha / (rho e beta) elements, where
    alpha is the latency of a message, rho the density, e the bytes per entry and beta the seconds per byte.
    For rho = 0.001, that is about 14 million elements at 1 Gbit/s (alpha 0.4 ms) and 6 million at 10 Mbit/s
    (17 ms); for a dense exchange, where rho e is 4 bytes, it is 12,000 and 5,000 elements.

    Attributes:
        buckets: the maximum number of buckets.
        least: the minimum number of elements in a bucket.  None means 65,536 or, for a sparse exchange, the
            number that yields 6,000 entries if that is larger.  A gradient shorter than two such buckets is
            not divided.
        adaptive: whether the group occasionally times steps with and without overlap, and overlaps only if
            that saves time.
    """

    buckets: int = 4
    least: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        remedy = "try buckets=4"
        _check_number("buckets", self.buckets, "from 1 to 256", lambda x: 1 <= x <= 256, remedy, whole=True)
        if self.least is not None:
            _check_number("least", self.least, ">= 1", lambda x: x >= 1, "try least=1_000_000", whole=True)
        _check_flag("adaptive", self.adaptive)

    def describe(self) -> str:
        """Return a description of the settings, which must be equal on all workers."""
        least = "" if self.least is None else f" of at least {self.least} elements"
        return f"{'' if self.adaptive else ' always'} in at most {self.buckets} buckets{least}"

    def least_of(self, exchange: Exchange) -> int:
        """Return the minimum number of elements in a bucket with this exchange."""
        if self.least is not None:
            return self.least
        return 1 << 16 if isinstance(exchange, Dense) else max(1 << 16, round(6000 / exchange.density))


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Local training: each worker takes `every` optimizer steps alone, then exchanges the change in its
    parameters.

    This is DiLoCo (arXiv 2311.08105) or, with a sparse exchange, SparseLoCo (arXiv 2508.15706).  Use it with
    AdamW on slow links.  One step of the run is then one exchange, that is, `every` steps of the training
    loop.

    Attributes:
        every: the number of optimizer steps between two exchanges, which must be the same on all workers;
            `gridtrain.propose_local_steps` proposes a number.
        exchange: how the changes in the parameters are shared; its momentum must be 0.  With `Auto(...)`, the
            coordinator chooses the exchange, for turns of `every` steps.
        outer_learning_rate: the factor by which the group's mean change is multiplied; 1 is plain averaging.
        outer_momentum: the Nesterov momentum applied to the exchanged changes; 0 disables it.
        overlap: the number of further local steps, from 1 to `every`, that are computed while the change in
            the parameters is exchanged.  They start from (1 + 1 / P) / 2 of the worker's own change, where
            P is the number of workers; after them, the group's change replaces that share (Streaming
            DiLoCo, arXiv 2501.18512; eager updates, arXiv 2502.12996).  True stands for `every`; False
            disables overlap.
    """

    every: int
    exchange: Exchange | Auto = field(default_factory=GTopK)
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    overlap: bool | int = False

    def __post_init__(self) -> None:
        bounds, remedy = (
            ">= 1, with the same value on all workers",
            "try every=32, or the number that gridtrain.propose_local_steps(...) proposes",
        )
        _check_number("every", self.every, bounds, lambda x: x >= 1, remedy, whole=True)
        if not isinstance(self.overlap, int) or not 0 <= self.overlap <= self.every:
            raise ConfigError(
                f"overlap is {self.overlap!r}; it must be True, False, or a number of local steps from 1 to "
                f"every, which is {self.every}",
                remedy="pass a number of local steps that take longer than an exchange",
            )
        if not isinstance(self.exchange, Exchange | Auto):
            raise ConfigError(
                f"exchange is {self.exchange!r}, which LocalSteps does not support",
                remedy="use Dense(), TopK(...), GTopK(...) or Auto(...)",
            )
        if getattr(self.exchange, "momentum", 0.0):
            raise ConfigError(
                f"{self.exchange.describe()} applies momentum to gradients, "
                "but LocalSteps exchanges parameter changes",
                remedy="build the exchange with momentum=0 and try LocalSteps(outer_momentum=...)",
            )
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        remedy = "try outer_learning_rate=1.0"
        _check_number("outer_learning_rate", rate, "> 0 and finite", lambda x: 0.0 < x < math.inf, remedy)
        remedy = "try outer_momentum=0.9 with outer_learning_rate=0.7"
        _check_number("outer_momentum", momentum, ">= 0 and < 1", lambda x: 0.0 <= x < 1.0, remedy)

    @property
    def sparse(self) -> bool:
        return self.exchange.sparse

    @property
    def overlapped_steps(self) -> int:
        """The number of local steps that overlap with an exchange; 0 without overlap."""
        return self.every if self.overlap is True else int(self.overlap)

    def describe(self) -> str:
        outer = f"outer_learning_rate={self.outer_learning_rate}, outer_momentum={self.outer_momentum}"
        steps = self.overlapped_steps
        overlap = f", overlap={True if steps == self.every else steps}" if steps else ""
        return f"LocalSteps(every={self.every}, exchange={self.exchange.describe()}, {outer}{overlap})"


def round_exchange(exchange: Exchange | LocalSteps | Auto) -> Exchange | Auto:
    """Return the exchange that each round uses: `exchange` itself, or the exchange of a `LocalSteps`."""
    return exchange.exchange if isinstance(exchange, LocalSteps) else exchange


_TRY_WARMUP = "try warmup=((100, 0.25), (200, 0.0625))"


def _check_number(
    name: str,
    value: Any,
    bounds: str,
    is_within: Callable[[float], bool],
    remedy: str,
    *,
    whole: bool = False,
) -> None:
    """Raise `ConfigError` unless `value` is a number within `bounds`, which `is_within` checks."""
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not is_within(value):
        number = "an integer" if whole else "a number"
        raise ConfigError(f"{name} is {value!r}; it must be {number} {bounds}", remedy=remedy)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False", remedy=f"use {name}=True")


def _check_choice(subject: str, value: str, known: tuple[str, ...], kind: str) -> None:
    """Raise `ConfigError` unless `value` is one of `known`.  `subject` begins with the argument's name."""
    if value not in known:
        argument = subject.partition(" ")[0]
        raise ConfigError(
            f'{subject} is "{value}", which is not a known {kind}',
            remedy="use one of " + ", ".join(f'{argument}="{name}"' for name in known),
        )


# -- deadlines -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadlines:
    """All timeouts and intervals, in seconds, and one factor.  Progress extends the timeouts marked (+)."""

    beat_s: float = 0.5  # interval of heartbeats to the coordinator
    silence_s: float = 5.0  # longest heartbeat timeout; for a worker that loads a state, ready_s applies
    regreet_s: float = 1.0  # time within which a broken connection may be restored
    ended_s: float = 0.05  # replaces regreet_s if another member's connection to that worker also broke
    report_s: float = 2.0  # time for the answers to a Freeze
    regather_s: float = 60.0  # shortest wait for members if none is connected
    ready_s: float = 20.0  # (+) time to execute a verdict, receive the state and connect the links
    settle_s: float = 0.3  # wait for joins, or reports of missing connections, at about the same time
    reach_s: float = 3.0  # time for the coordinator to dial back and find out whether a worker can be reached
    route_s: float = 8.0  # time to connect a link, or half of it to restore a lost link, before it is relayed
    probe_s: float = 2.0  # time to measure the links to the other workers; see also `MEMBER_PROBE_S`
    generation_gap_s: float = 1.0  # shortest time between two generations
    recut_s: float = 15.0  # wait for a missing worker before the model is repartitioned
    reshare_s: float = 30.0  # shortest time between two generations that only change shares
    first_step_s: float = 300.0  # (+) timeout of a first step (compilation)
    patience_floor_s: float = 5.0  # (+) shortest timeout of a silent member in a round
    patience_factor: float = 8.0  # timeout = floor + factor * a usual step's time
    handover_s: float = 5.0  # time for the residual transfer of a worker that leaves
    paused_s: float = 1800.0  # time after which a worker gives up waiting for a coordinator that it needs
    connect_s: float = 15.0  # time for the first contact with the coordinator

    def __post_init__(self) -> None:
        for each in fields(self):
            value, remedy = getattr(self, each.name), f"the default is {each.default}"
            _check_number(each.name, value, ">= 0", lambda x: x >= 0, remedy)


# -- how a worker joins its run --------------------------------------------------------------------


MAX_UPDATE_LOG_MIB = 1 << 14


DEFAULT_DONATE_LIMIT = "25Mbit"
DEFAULT_DONATE_SHARE = 0.25
"""If `JoinConfig.donate_limit` is "", the state is sent to newcomers at no more than this rate, and no
more than this share of `upload_limit`."""


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """The settings of `gridtrain.join`.  `from_environment` also reads settings that the agent (the process
    of `gridtrain worker`) passes in the environment.

    Attributes:
        coordinator_key: the coordinator's public key in hexadecimal.
        identity: the file with this worker's key pair.
        listen: the address to listen on; "" uses any free port of the interface that leads to the
            coordinator.
        checkpoint_every: the number of steps between two checkpoints on this worker's disk; "0" writes none.
        checkpoint_keep: the number of checkpoints to keep.
        handover_mib: the maximum size in MiB of the residual that a worker sends when it leaves; "0" sends
            nothing.
        state_dir: the folder for checkpoints; "" uses a folder named after the coordinator's key, in the
            state directory.  None uses the same folder, but nothing is saved when the worker leaves.
        donate_limit: the upload limit for sending the state to newcomers while this worker trains; "" uses
            the lower of `DEFAULT_DONATE_LIMIT` and `DEFAULT_DONATE_SHARE` of `upload_limit`.
        relay: whether to forward messages between other members, "yes" or "no".
        unencrypted: "yes" disables encryption; the coordinator needs the same setting.
        contribution: the file in which this worker reports its steps, samples and bytes to the agent; ""
            reports nothing.
        wait: the default of `Grid.optimizer(wait=)`, one of `WAITS`.
        base: the default of `Grid.optimizer(base=)`, one of `BASES`.
        checkpoints: the URL to which checkpoints are uploaded; "" uploads none.
        faults: the planned faults, in the form that `gridtrain.testing.Faults.parse` accepts; "" injects
            none.
        update_log_mib: the memory in MiB for the updates of the latest steps, from which a newcomer
            catches up; if it is small, the group may have to wait while a slow worker receives the state.
    """

    coordinator: str
    coordinator_key: str
    identity: str = ""
    run: str = "default"
    name: str = ""
    listen: str = ""
    advertise: str = ""
    upload_limit: str = ""
    download_limit: str = ""
    donate_limit: str = ""
    export_dir: str | None = ""  # None: the final model is not written
    checkpoint_every: str = "500"
    checkpoint_keep: str = "2"
    state_dir: str | None = ""
    handover_mib: str = "16"
    relay: str = "yes"
    unencrypted: str = ""
    faults: str = ""
    contribution: str = ""
    wait: str = "all"
    base: str = "exact"
    checkpoints: str = ""
    update_log_mib: str = "128"
    deadlines: Deadlines = field(default_factory=Deadlines)

    @property
    def update_log_bytes(self) -> int:
        """The memory for the update log in bytes.

        Raises `ConfigError` if the setting is not an integer from 1 to `MAX_UPDATE_LOG_MIB`.
        """
        if not self.update_log_mib.isdecimal() or not 1 <= int(self.update_log_mib) <= MAX_UPDATE_LOG_MIB:
            raise ConfigError(
                f"update_log_mib is {self.update_log_mib[:40]!r}; it must be from 1 to {MAX_UPDATE_LOG_MIB}",
                remedy=f"set {ENV_PREFIX}UPDATE_LOG_MIB to a size in MiB, such as 32",
            )
        return int(self.update_log_mib) << 20

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **overrides: str | None
    ) -> JoinConfig:
        """Return the settings: arguments take precedence over `GRIDTRAIN_*` variables, which take precedence
        over defaults.

        Raises `ConfigError` if the coordinator, its key or the identity is missing, or if the key is invalid.
        """
        source = os.environ if environ is None else environ
        names = tuple(known.name for known in fields(cls) if known.name != "deadlines")
        values: dict[str, str] = {}
        for name in names:
            value = overrides.get(name)
            if value is None:
                value = source.get(ENV_PREFIX + name.upper())
            if value:
                values[name] = value
        if not {"coordinator", "coordinator_key", "identity"} <= values.keys():
            raise ConfigError(
                "no invitation was given, so gridtrain cannot tell which run to join",
                remedy="start the script with `gridtrain worker INVITATION -- python train.py`, "
                'or pass the invitation: gridtrain.join("gridtrain1:...")',
            )
        if not _KEY.fullmatch(values["coordinator_key"]):
            raise ConfigError(
                f"the coordinator's key is {values['coordinator_key'][:80]!r}; it must be 64 hex digits",
                remedy=f"let `gridtrain worker` set {ENV_PREFIX}COORDINATOR_KEY, or pass the invitation",
            )
        return cls(**values)  # type: ignore[arg-type]
