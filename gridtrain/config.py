"""Users' options as small frozen dataclasses, and the deadlines of all waits.  Without torch and sockets."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from gridtrain.errors import ConfigError

DEFAULT_PORT = 7700
ENV_PREFIX = "GRIDTRAIN_"
_KEY = re.compile(r"[0-9a-f]{64}")


# -- exchanges: how gradients are shared -----------------------------------------------------------

VALUES = ("fp16", "fp32", "bf16", "int8")
"""Encodings of the values of a sparse exchange."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Dense all-reduce of float32 gradients: every element, every step.

    Attributes:
        topology: "auto": the coordinator uses "direct" for small models on similar links, else "ring"; "ring"
            (Baidu, 2017); "direct": each member sums a chunk, two hops, all members connected to each other;
            or "star": all send to rank 0, as to a parameter server.
    """

    topology: str = "auto"

    def __post_init__(self) -> None:
        _check_topology("Dense", self.topology, ("auto", "ring", "direct", "star"))

    @property
    def sparse(self) -> bool:
        return False

    def describe(self) -> str:
        return "Dense()" if self.topology == "auto" else f"Dense(topology={self.topology})"


@dataclass(frozen=True, slots=True)
class _Sparse:
    """Options of both sparse exchanges.

    Attributes:
        density: rho; k = max(1, round(rho * n)) of n elements are sent.
        momentum: DGC momentum correction (arXiv 1712.01887, section 3.1); 0: off.
        values: "fp16", "fp32", "bf16" or "int8", the encoding of values; rounding errors go to the residual.
        warmup: densities of the first steps as ((until_step, density), ...), ascending: a function
            of the global step alone, so that a worker that joins late agrees with the others.
    """

    density: float = 0.01
    momentum: float = 0.0
    values: str = "fp16"
    warmup: tuple[tuple[int, float], ...] = field(default=())

    def __post_init__(self) -> None:
        for name, value in (("density", self.density), *(("warmup density", d) for _, d in self.warmup)):
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{name} is {value}; it must be > 0 and <= 1", remedy="try density=0.01")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(
                f"momentum is {self.momentum}; it must be >= 0 and < 1", remedy="try momentum=0.9"
            )
        if self.values not in VALUES:
            raise ConfigError(
                f'values is "{self.values}"',
                remedy="use one of " + ", ".join(f'values="{name}"' for name in VALUES),
            )
        bounds = [until for until, _ in self.warmup]
        if bounds != sorted(set(bounds)) or any(b <= 0 for b in bounds):
            raise ConfigError(
                f"warmup steps are {bounds}; they must be positive and ascending",
                remedy="for instance warmup=((100, 0.25), (200, 0.0625))",
            )

    @property
    def sparse(self) -> bool:
        return True

    def density_at(self, step: int) -> float:
        """Density of global step `step`."""
        for until_step, density in self.warmup:
            if step < until_step:
                return density
        return self.density

    def k_at(self, step: int, n: int) -> int:
        """Number of entries that a worker selects out of `n` in step `step`."""
        return min(n, max(1, round(self.density_at(step) * n)))

    def describe(self) -> str:
        warmup = f", warmup={self.warmup}" if self.warmup else ""
        name = type(self).__name__
        return f"{name}(density={self.density}, momentum={self.momentum}, values={self.values}{warmup})"


@dataclass(frozen=True, slots=True)
class TopK(_Sparse):
    """All-gather of every worker's k largest elements: the sum has up to P*k entries."""

    @property
    def topology(self) -> str:
        return "all-gather"


@dataclass(frozen=True, slots=True)
class GTopK(_Sparse):
    """Global top-k in O(k log P) by merges (after arXiv 1901.04359).

    Attributes:
        topology: "butterfly"; "tree", as in the paper; or "star": all send to rank 0, which merges once.
    """

    topology: str = "butterfly"

    def __post_init__(self) -> None:
        _Sparse.__post_init__(self)  # super() does not work in a dataclass with slots
        _check_topology("GTopK", self.topology, ("butterfly", "tree", "star"))

    def describe(self) -> str:
        text = _Sparse.describe(self)
        return text if self.topology == "butterfly" else f"{text[:-1]}, topology={self.topology})"


Exchange = Dense | TopK | GTopK

_AUTO = re.compile(r"auto\(([^()]*)\)")
_LEARNS = ((120_576, 0.05), (25_600_000, 0.001))


@dataclass(frozen=True, slots=True)
class Auto:
    """The coordinator chooses `Dense()`, `GTopK` or `TopK`, from measured links and computing speed.

    It may choose again during the run.  A dense step then sends the residuals of sparse ones, too.

    Attributes:
        density: of the sparse exchanges; None: by the model's size, see `density_of`.
        values: encoding of the sparse exchanges' values.
        sparse: whether sparse exchanges may be chosen; not with an optimizer that learns badly from them.
    """

    density: float | None = None
    values: str = "fp16"
    sparse: bool = True

    def __post_init__(self) -> None:
        self.exchanges(1)  # checks density and values

    @property
    def topology(self) -> str:
        """Before anything is chosen."""
        return "ring"

    @staticmethod
    def density_of(parameters: int) -> float:
        """Interpolates two sizes that learn: 0.05 with 120,576 parameters (the demo's GPT, which fails with
        0.001), 0.001 with 25.6 million (ResNet-50 in arXiv 1901.04359); linear in the logarithms between."""
        (small, dense), (large, thin) = _LEARNS
        if parameters <= small:
            return dense
        if parameters >= large:
            return thin
        part = math.log(parameters / small) / math.log(large / small)
        return float(f"{dense * (thin / dense) ** part:.2g}")

    def exchanges(self, parameters: int) -> tuple[Exchange, ...]:
        """The exchanges that may be chosen for a model with this many parameters."""
        if not self.sparse:
            return (Dense(),)
        density = self.density if self.density is not None else self.density_of(parameters)
        return Dense(), GTopK(density, values=self.values), TopK(density, values=self.values)

    def describe(self) -> str:
        """A text that `parse` reads."""
        if not self.sparse:
            return "auto(dense alone)"
        density = f"density={self.density}, " if self.density is not None else ""
        return f"auto({density}values={self.values})"

    @classmethod
    def parse(cls, text: str) -> Auto | None:
        """None if `describe` did not write the text."""
        found = _AUTO.fullmatch(text)
        if found is None:
            return None
        if found[1] == "dense alone":
            return cls(sparse=False)
        said = dict(option.strip().partition("=")[::2] for option in found[1].split(",") if "=" in option)
        try:
            return cls(float(said["density"]) if "density" in said else None, said.get("values", "fp16"))
        except (ConfigError, ValueError):
            return None


def exchange_of(given: Exchange | LocalSteps | Auto | str | None) -> Exchange | LocalSteps | Auto:
    """The exchange that `exchange=` names.  Raises `ConfigError` for an unknown word."""
    if given is None:
        return GTopK()
    if given == "auto":
        return Auto()
    if isinstance(given, str):
        raise ConfigError(f'exchange is "{given}"', remedy='the only word is exchange="auto"')
    return given


@dataclass(frozen=True, slots=True)
class Overlap:
    """Exchange while backward still computes: the gradient is sent in buckets, last layers first.

    The same on all workers.  A bucket should have at least alpha / (rho e beta) elements (a message's
    latency, the density, bytes per entry, seconds per byte): for rho = 0.001 about 14 M at 1 Gbit/s (alpha
    0.4 ms) and 6 M at 10 Mbit/s (17 ms); dense, with 4 bytes for rho e, 12,000 and 5,000.

    Attributes:
        buckets: most buckets.
        least: fewest elements of a bucket; None: 65,536 with a dense exchange, with a sparse one as many as
            have 6,000 entries.  A gradient shorter than two buckets is not divided.
        adaptive: the group tries both ways now and then, and overlaps only if that saves time.
    """

    buckets: int = 4
    least: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.buckets <= 256:
            raise ConfigError(f"buckets is {self.buckets}; it must be 1 .. 256", remedy="try buckets=4")
        if self.least is not None and self.least < 1:
            raise ConfigError(f"least is {self.least}; it must be >= 1", remedy="try least=1_000_000")

    def describe(self) -> str:
        """What must be equal on all workers."""
        least = "" if self.least is None else f" of at least {self.least} elements"
        return f"{'' if self.adaptive else ' always'} in at most {self.buckets} buckets{least}"

    def least_of(self, exchange: Exchange) -> int:
        """Fewest elements of a bucket."""
        if self.least is not None:
            return self.least
        return 1 << 16 if isinstance(exchange, Dense) else max(1 << 16, round(6000 / exchange.density))


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """`every` optimizer steps on each worker alone, then one exchange of the change of its parameters.

    DiLoCo (arXiv 2311.08105), and with a sparse exchange SparseLoCo (arXiv 2508.15706): for AdamW on slow
    links. A step of the run is then one exchange, and `every` of the loop's steps.

    Attributes:
        every: optimizer steps between two exchanges, the same on all workers;
            `gridtrain.propose_local_steps` proposes a number.
        exchange: how the changes of the parameters are shared; without momentum.
        outer_learning_rate: factor of the group's mean change; 1: plain averaging.
        outer_momentum: Nesterov momentum over the exchanged changes; 0: none.
    """

    every: int
    exchange: Exchange = field(default_factory=GTopK)
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(
                f"every is {self.every!r}; it must be a whole number >= 1, the same on all workers",
                remedy="try every=32, or what gridtrain.propose_local_steps(...) proposes",
            )
        if not isinstance(self.exchange, Exchange):
            raise ConfigError(
                f"exchange is {self.exchange!r}, which LocalSteps does not support",
                remedy="use Dense(), TopK(...) or GTopK(...)",
            )
        if getattr(self.exchange, "momentum", 0.0):
            raise ConfigError(
                f"{self.exchange.describe()} applies momentum to gradients, but LocalSteps exchanges none",
                remedy="build the exchange with momentum=0, and try LocalSteps(outer_momentum=...)",
            )
        if not 0.0 < self.outer_learning_rate < float("inf"):
            raise ConfigError(
                f"outer_learning_rate is {self.outer_learning_rate}; it must be > 0 and finite",
                remedy="try outer_learning_rate=1.0",
            )
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ConfigError(
                f"outer_momentum is {self.outer_momentum}; it must be >= 0 and < 1",
                remedy="try outer_momentum=0.9 with outer_learning_rate=0.7",
            )

    @property
    def sparse(self) -> bool:
        return self.exchange.sparse

    def describe(self) -> str:
        outer = f"outer_learning_rate={self.outer_learning_rate}, outer_momentum={self.outer_momentum}"
        return f"LocalSteps(every={self.every}, exchange={self.exchange.describe()}, {outer})"


def round_exchange(exchange: Exchange | LocalSteps | Auto) -> Exchange | Auto:
    """The exchange of a single round."""
    return exchange.exchange if isinstance(exchange, LocalSteps) else exchange


def _check_topology(exchange: str, topology: str, known: tuple[str, ...]) -> None:
    if topology not in known:
        raise ConfigError(
            f'topology of {exchange} is "{topology}"',
            remedy="use one of " + ", ".join(f'topology="{name}"' for name in known),
        )


# -- deadlines -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadlines:
    """All timeouts, in seconds.  Progress extends those marked (+)."""

    beat_s: float = 0.5  # interval of heartbeats to the coordinator
    silence_s: float = 5.0  # heartbeat timeout; ready_s for a worker that loads a state
    regreet_s: float = 1.0  # time for a broken connection to come back
    ended_s: float = 0.1  # the same, if another member's connection to that worker broke as well
    report_s: float = 2.0  # answers to a FREEZE
    regather_s: float = 60.0  # shortest wait for members that are all away
    ready_s: float = 20.0  # (+) verdict executed, state received, links connected
    settle_s: float = 0.3  # joins that arrive together start together
    reach_s: float = 3.0  # the coordinator dials back to learn whether a worker can be reached
    route_s: float = 8.0  # a link of the next generation that is not connected by then is relayed
    probe_s: float = 2.0  # round trips to the other workers
    generation_gap_s: float = 1.0  # shortest time between two generations
    recut_s: float = 15.0  # wait this long for a missing worker before repartitioning the model
    reshare_s: float = 30.0  # shortest time between two generations that only change shares
    first_step_s: float = 300.0  # (+) timeout of a first step (compilation)
    patience_floor_s: float = 5.0  # (+) shortest timeout of a silent member in a round
    patience_factor: float = 8.0  # timeout = floor + factor * a usual step's time
    handover_s: float = 5.0  # residual transfer of a worker that leaves
    paused_s: float = 1800.0  # without the coordinator, if it is needed, before a worker gives up
    connect_s: float = 15.0  # first contact with the coordinator


# -- how a worker joins its run --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """The settings of `gridtrain.join`; by default from the environment that the agent sets.

    Attributes:
        coordinator_key: its public key in hexadecimal.
        identity: the file with this worker's key pair.
        listen: "": any free port of the interface that leads to the coordinator.
        checkpoint_every: steps between two checkpoints on this worker's disk; "0": none.
        checkpoint_keep: number of checkpoints to keep.
        handover_mib: most of its residual that a worker sends when it leaves; "0": nothing.
        state_dir: the folder of checkpoints; "": in the state directory, under the coordinator's key.
        donate_limit: upload limit of states for joining workers while this worker trains.
        relay: "no": do not forward messages of other members.
        unencrypted: "yes": do not encrypt; the coordinator has to be set likewise.
        contribution: a file in which this worker reports its contribution to the agent; "": none.
        faults: faults to inject, see `gridtrain.testing.Faults`; "": none.
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
    donate_limit: str = "25Mbit"
    export_dir: str = ""
    checkpoint_every: str = "500"
    checkpoint_keep: str = "2"
    state_dir: str = ""
    handover_mib: str = "16"
    relay: str = "yes"
    unencrypted: str = ""
    faults: str = ""
    contribution: str = ""
    deadlines: Deadlines = field(default_factory=Deadlines)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **overrides: str | None
    ) -> JoinConfig:
        """Arguments win over `GRIDTRAIN_*` variables, which win over defaults.

        Raises `ConfigError` if no coordinator is named, or its key is invalid.
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
                "this script does not know which run to join",
                remedy="start it with `gridtrain worker INVITATION -- python train.py`, "
                'or pass the invitation: gridtrain.join("gridtrain1:...")',
            )
        if not _KEY.fullmatch(values["coordinator_key"]):
            raise ConfigError(
                f"the coordinator's key is {values['coordinator_key'][:80]!r}; it must be 64 hex digits",
                remedy=f"leave {ENV_PREFIX}COORDINATOR_KEY to `gridtrain worker`, or pass the invitation",
            )
        return cls(**values)  # type: ignore[arg-type]
