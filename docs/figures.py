"""Fills the measured figures of README.md and docs/ in from the files in benchmarks/results.

In Markdown a figure is `<!--=NAME-->1.06<!--/-->`.  NAME is in `FIGURES`, which maps it to a result file and
an expression, or it is FILE:KEY: a figure copied from the output of a command into
benchmarks/results/recorded/FILE.json, for example mutants:killed from

    {"command": "make mutants", "date": "2026-11-23", "machine": "2 CPU cores", "figures": {"killed": 91.5}}

tests/docs/test_figures.py fails if a page has a measured number without such a mark.

    python docs/figures.py            writes the values into the pages
    python docs/figures.py --check    exits with 1 where a page and a result file differ
    python docs/figures.py --list     prints all names and values
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDED = RESULTS / "recorded"
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions"),
]
MARK = re.compile(r"<!--=(?P<name>[\w.:-]+)-->(?P<value>[^<]*)<!--/-->")

Figure = Callable[[], str]


@cache
def result(name: str) -> Any:
    """The result file `name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cell(file: str, words: str) -> dict[str, Any]:
    """The one cell of a bench file whose name has exactly these words, apart from n, density and 0.001."""
    ignored = ("n=", "density=")

    def reduced(text: str) -> set[str]:
        return {word for word in text.split() if not word.startswith(ignored)}

    found = [each for each in result(file)["cells"] if reduced(each["cell"]) == reduced(words)]
    if len(found) != 1:
        raise KeyError(f"{file}.json has {len(found)} cells {words!r}")
    return dict(found[0])


def seconds(file: str, words: str) -> float:
    """Median duration of an exchange."""
    return statistics.median(float(sample["seconds"]) for sample in cell(file, words)["samples"])


def ms(file: str, words: str) -> Figure:
    return lambda: f"{seconds(file, words) * 1e3:.3g}"


def bound(file: str, words: str) -> Figure:
    """Duration over the lower bound of a ring."""
    return lambda: f"{seconds(file, words) / cell(file, words)['bound_s']:.3f}"


def ratio(file: str, slower: str, faster: str) -> Figure:
    return lambda: f"{seconds(file, slower) / seconds(file, faster):.1f}"


def of_gloo(elements: int) -> Figure:
    """Duration of a small dense exchange over gloo's."""

    def value() -> str:
        cells = [each for each in result("wire")["cells"] if f" n={elements} " in each["cell"]]
        ours, gloo = (statistics.median(sample["seconds"] for sample in each["samples"]) for each in cells)
        return f"{ours / gloo:.2f}"

    return value


def run_s(file: str, workload: str, contender: str) -> dict[int, float]:
    """Seconds until the held-out loss, for each seed: the fastest run in a file of `python -m accuracy`."""
    fastest_s: dict[int, float] = {}
    for each in result(file)["runs"]:
        if (each["workload"], each["contender"]) == (workload, contender):
            seed, found_s = each.get("seed", 0), each["seconds"] or math.inf
            fastest_s[seed] = min(found_s, fastest_s.get(seed, math.inf))
    if math.inf in fastest_s.values():
        raise KeyError(f"{file}: {contender} did not reach the loss of {workload} with each seed")
    return fastest_s


def loss_s(file: str, workload: str, contender: str) -> Figure:
    """Seconds until the held-out loss of the workload, the median over seeds."""
    return lambda: f"{statistics.median(run_s(file, workload, contender).values()):.1f}"


def sooner(file: str, workload: str, contender: str, reference: str, least: bool = False) -> Figure:
    """Seconds of the reference over those of the contender, with the same seed: median or least of seeds."""

    def value() -> str:
        ours, theirs = run_s(file, workload, contender), run_s(file, workload, reference)
        ratios = [theirs[seed] / ours[seed] for seed in ours.keys() & theirs.keys()]
        return f"{min(ratios) if least else statistics.median(ratios):.1f}"

    return value


def steps_to_target(file: str, family: str, values: str, seed: int = 0) -> Figure:
    """Steps until the held-out loss of the workload, in a file of `python -m accuracy.tune`."""
    kind = {"family": family, "values": values, "seed": seed}
    return lambda: str(next(t["reached"] for t in result(file)["tried"] if t.items() >= kind.items()))


def median_steps(file: str, variant: str) -> Figure:
    """Median over seeds of the steps until the held-out loss of the workload; infinite where it was not
    reached."""
    return lambda: str(
        statistics.median(t["reached"] or math.inf for t in result(file)["tried"] if t["gathered"] == variant)
    )


def per_entry(words: str) -> Figure:
    """Bytes of an entry: of 25,600 in each hop."""
    return lambda: (
        f"{statistics.median(s['payload_bytes'] for s in cell('goals', words)['samples']) / 25_600:.2f}"
    )


def paper_row(model: str, workers: int, contender: str) -> dict[str, Any]:
    """The latest row of `python emulated.py paper` for this model, group and contender."""
    rows = [*result("paper_lab")["rows"], *result("paper_lab_p8")["rows"]]
    wanted = (model, workers, contender)
    found: list[dict[str, Any]] = [
        row for row in rows if (row["model"], row["workers"], row["contender"]) == wanted
    ]
    return found[-1]


def efficiency(model: str, workers: int, contender: str) -> Figure:
    """Share of computing in a step, per cent."""
    return lambda: f"{paper_row(model, workers, contender)['efficiency'] * 100:.1f}"


def published(model: str, workers: int, contender: str) -> Figure:
    """The same share in the paper, per cent."""
    return lambda: f"{paper_row(model, workers, contender)['paper'] * 100:.1f}"


def order_gain(file: str, case: str, exchange: str) -> Figure:
    """Duration in the order of joining over the duration in the planned order."""

    def value() -> str:
        took_s = {
            outcome["order"]: statistics.median(outcome["seconds"])
            for outcome in result(file)["outcomes"]
            if (outcome["case"]["name"], outcome["case"]["exchange"]) == (case, exchange)
        }
        return f"{took_s['joined'] / took_s['planned']:.2f}"

    return value


def storm(file: str, kind: str, field: str) -> Figure:
    return lambda: f"{result(file)['chaos']['by_kind'][kind][field]:.2f}"


def kept(file: str) -> Figure:
    return lambda: f"{result(file)['kept'] * 100:.1f}"


def faults(file: str) -> Figure:
    return lambda: str(sum(result(file)["chaos"]["faults"].values()))


def peak_mib(schedule: str, rematerialise: bool) -> Figure:
    def value() -> str:
        (row,) = (
            row
            for row in result("pipeline")["memory"]["rows"]
            if (row["schedule"], row["rematerialise"]) == (schedule, rematerialise)
        )
        return f"{row['peak_bytes'] / 2**20:.0f}"

    return value


def step_ms(part: str, key: str) -> Figure:
    """Median step of a pipeline."""

    def value() -> str:
        (row,) = (row for row in result("pipeline")[part]["rows"] if key in (row.get("case"), row["key"]))
        return f"{statistics.median(row['times_s']) * 1e3:.1f}"

    return value


def ideal_share(part: str, key: str) -> Figure:
    """The ideal step, in which only the bubble is lost, over the measured one, per cent."""

    def value() -> str:
        (row,) = (row for row in result("pipeline")[part]["rows"] if key in (row.get("case"), row["key"]))
        return f"{row['ideal_s'] / statistics.median(row['times_s']) * 100:.1f}"

    return value


def ideal_ms(case: str) -> Figure:
    """The step in which only the bubble is lost, of stages that run as real processes."""

    def value() -> str:
        (row,) = (row for row in result("pipeline")["runtime"]["rows"] if row.get("case") == case)
        return f"{row['ideal_s'] * 1e3:.0f}"

    return value


def median_s(part: str, *keys: str) -> float:
    """The shortest of the median steps of these rows."""
    rows = [row for row in result("pipeline")[part]["rows"] if row.get("case") in keys or row["key"] in keys]
    return min(float(statistics.median(row["times_s"])) for row in rows)


def step_ratio(part: str, above: tuple[str, ...], below: str) -> Figure:
    return lambda: f"{median_s(part, *above) / median_s(part, below):.2f}"


def local_steps(name: str, field: str, digits: int = 3, factor: float = 1.0) -> Figure:
    """A value of local_steps.json after 256 steps."""

    def value() -> str:
        (row,) = (row for row in result("local_steps")["results"] if row["name"] == name)
        return f"{row[field][-1] * factor:.{digits}f}"

    return value


def selection_ns(n: int, case: str, field: str = "cpu_ns_median") -> Figure:
    """CPU time a parameter."""

    def value() -> str:
        (row,) = (row for row in result("selection")["results"] if row["n"] == n)
        return f"{row['cases'][case][field]:.2f}"

    return value


def overlap(exchange: str, rate: str, field: str, factor: float = 1.0, digits: int = 3) -> Figure:
    def value() -> str:
        (row,) = (
            row for row in result("overlap")["rows"] if (row["exchange"], row["rate"]) == (exchange, rate)
        )
        return f"{row[field] * factor:.{digits}f}"

    return value


def unreached(file: str, workload: str, contender: str, field: str, digits: int) -> Figure:
    """Last held-out loss, or its time, of a run that did not reach the loss."""

    def value() -> str:
        (row,) = (
            row
            for row in result(file)["runs"]
            if (row["workload"], row["contender"]) == (workload, contender)
        )
        return f"{row[field]:.{digits}f}"

    return value


def crowd(workers: int, fields: Sequence[str], factor: float) -> Figure:
    """The largest of these fields; of (p50, p99), the p99."""

    def value() -> str:
        (row,) = (row for row in result("crowd")["results"] if row["workers"] == workers)
        numbers = (row[field][1] if isinstance(row[field], list) else row[field] for field in fields)
        number = max(numbers) * factor
        return f"{number:.3g}"

    return value


def scaling(exchange: str, members: int = 1000) -> Figure:
    """Predicted seconds of an exchange."""
    return lambda: f"{_scaling(exchange, members)['model_s']:.2g}"


def _scaling(exchange: str, members: int) -> dict[str, Any]:
    rows = result("scaling")["results"]
    return next(row for row in rows if (row["exchange"], row["members"]) == (exchange, members))


def scaling_error(at: int) -> Figure:
    """By how many percent prediction and collectives differ, the largest difference first."""

    def value() -> str:
        rows = [row for row in result("scaling")["results"] if "simulated_s" in row]
        return (
            f"{100 * sorted((abs(x['model_s'] / x['simulated_s'] - 1) for x in rows), reverse=True)[at]:.1f}"
        )

    return value


LAN, FAST = "rate=1Gbit", "rate=100Mbit"


FIGURES: dict[str, Figure] = {
    "small-of-gloo": of_gloo(120_000),
    "million-of-gloo": of_gloo(1_000_000),
    "small-cpu-of-gloo": lambda: f"{result('quick')['figures']['small dense CPU']:.2f}",
    "entry-fp16": per_entry("gtopk P=4 rate=100Mbit"),
    "entry-int8": per_entry("gtopk:values=int8 P=4 rate=100Mbit"),
    "home-gtopk": order_gain("sites_home", "home", "gtopk:density=0.01"),
    "home-star": order_gain("sites_home", "home", "gtopk:topology=star,density=0.01"),
    "sites-gtopk": order_gain("sites_sparse", "sites", "gtopk:density=0.01"),
}
FIGURES |= {
    "scaling-worst-percent": scaling_error(0),
    "scaling-second-percent": scaling_error(1),
    "scaling-ring-s": scaling("ring"),
    "scaling-topk-s": scaling("TopK"),
    "scaling-gtopk-s": scaling("GTopK"),
    "scaling-star-s": scaling("GTopK, star"),
}
FIGURES |= {
    f"crowd-{workers}-{name}": crowd(workers, *source)
    for workers in (1000, 2000)
    for name, source in {
        "storm-s": (("storm_s",), 1.0),
        "heartbeat-ms": (("calm_beat_s",), 1e3),
        "change-beat-ms": (("change_beat_s",), 1e3),
        "longest-ms": (("longest_s", "change_longest_s"), 1e3),
        "status-ms": (("status_s",), 1e3),
        "core-percent": (("calm_core_share",), 1e2),
        "first-MB": (("storm_bytes",), 1e-6),
        "MiB": (("peak_bytes",), 2.0**-20),
    }.items()
}
FIGURES |= {
    "powersgd-gpt-loss": unreached("accuracy_gpt_20Mbit", "gpt", "powersgd", "last_loss", 2),
    "powersgd-resnet-s": loss_s("accuracy_20Mbit", "resnet", "powersgd"),
}
_AVERAGED = ", outer lr 1 momentum 0, lr 0.003"
for _name, _case in (
    ("dense-1", "Dense, each step, lr 0.003"),
    ("gtopk-1", "GTopK 0.03, each step, lr 0.003"),
    ("gtopk-4", "GTopK 0.03, H=4" + _AVERAGED),
    ("gtopk-16", "GTopK 0.03, H=16" + _AVERAGED),
    ("topk-16", "TopK 0.03, H=16" + _AVERAGED),
    ("dense-32", "Dense, H=32" + _AVERAGED),
):
    FIGURES |= {
        f"local-{_name}-256": local_steps(_case, "held_out"),
        f"local-{_name}-MB": local_steps(_case, "sent_bytes", digits=2, factor=1e-6),
    }
for _name, _case in (
    ("copy", "memory copy"),
    ("torch", "torch.topk(abs)"),
    ("carried", "ours: residual update, carried"),
    ("cold", "ours: residual update, cold"),
):
    FIGURES[f"select-{_name}-25m"] = selection_ns(25_600_000, _case)
for _name, _exchange, _rate in (
    ("dense-1g", "dense", "1000Mbit"),
    ("dense-100", "dense", "100Mbit"),
    ("gtopk-1g", "gtopk", "1000Mbit"),
    ("gtopk-100", "gtopk", "100Mbit"),
):
    FIGURES |= {
        f"overlap-{_name}-without-s": overlap(_exchange, _rate, "without_s"),
        f"overlap-{_name}-with-s": overlap(_exchange, _rate, "with_s"),
    }
for _kind in ("fp32", "int4"):
    FIGURES[f"values-{_kind}-steps"] = steps_to_target("accuracy_values", "sparse", _kind)
for _kind in ("fp32", "int8"):
    for _seed in range(2):
        FIGURES[f"dense-values-{_kind}-steps-{_seed}"] = steps_to_target(
            "accuracy_dense_values", "adamw", _kind, _seed
        )
for _name, _options in (
    ("fp16", "values=fp16"),
    ("int8", "values=int8"),
    ("int2", "values=int2"),
    ("chunk", "values=int2,chunk=4096"),
    ("decay", "values=int2,chunk=4096,residual_decay=0.05"),
):
    FIGURES[f"few-bits-{_name}-steps"] = median_steps("accuracy_few_bits", f"8:density=0.03,{_options}")
for _P in (4, 8):
    _at = f"P={_P} {FAST}"
    FIGURES |= {
        f"gtopk-p{_P}-ms": ms("gtopk", f"gtopk {_at}"),
        f"butterfly-p{_P}-ms": ms("gtopk", f"gtopk:topology=butterfly {_at}"),
        f"gloo-gather-p{_P}-ms": ms("gtopk", f"gloo/all_gather {_at}"),
        f"mpi-gtopk-p{_P}-ms": ms("goals", f"mpi/gtopk {_at}"),
        f"mpi-gather-p{_P}-ms": ms("goals", f"mpi/all_gather {_at}"),
        f"gtopk-p{_P}-over-gloo": ratio("gtopk", f"gloo/all_gather {_at}", f"gtopk {_at}"),
    }
for _name, _file, _cell in (
    ("100-p4", "dense_as_it_comes", f"P=4 {FAST}"),
    ("1g-p4", "dense_as_it_comes", f"P=4 {LAN}"),
    ("100-p8", "dense_p8", f"P=8 {FAST}"),
    ("20ms", "goals", f"P=4 {LAN} delay=0.02s"),
):
    FIGURES |= {
        f"dense-{_name}": bound(_file, f"dense {_cell}"),
        f"gloo-{_name}": bound(_file, f"gloo/all_reduce {_cell}"),
    }
FIGURES |= {
    "mpi-100-p4": bound("goals", f"mpi/all_reduce P=4 {FAST}"),
    "mpi-100-p8": bound("goals", f"mpi/all_reduce P=8 {FAST}"),
    "mpi-1g-p4": bound("goals", f"mpi/all_reduce P=4 {LAN}"),
    "mpi-20ms": bound("goals", f"mpi/all_reduce P=4 {LAN} delay=0.02s"),
    "dense-1g-curve": bound("goals", f"dense P=4 {LAN} curve"),
}
for _name, _file, _load, _ours, _theirs in (
    ("gpt-20-adamw", "accuracy_gpt_20Mbit_overlap", "gpt", "local-topk", "gloo-adamw"),
    ("gpt-100-adamw", "accuracy_gpt_100Mbit_overlap", "gpt", "local-topk", "gloo-adamw"),
    ("gpt-1g-adamw", "accuracy_gpt_1000Mbit_overlap", "gpt", "local-topk", "gloo-adamw"),
    ("gpt-1g-dense-adamw", "accuracy_gpt_1000Mbit_overlap", "gpt", "dense-adamw", "gloo-adamw"),
    ("lstm-1g-dense-adamw", "accuracy_small_1000Mbit", "lstm", "dense-adamw", "gloo-adamw"),
    ("gpt-p8-adamw", "accuracy_gpt_p8_20Mbit", "gpt", "local-topk", "gloo-adamw"),
    ("lstm-20-adamw", "accuracy_20Mbit", "lstm", "local-topk", "gloo-adamw"),
    ("lstm-20-sgd", "accuracy_20Mbit", "lstm", "local-topk-sgd", "gloo"),
    ("resnet-20-adamw", "accuracy_20Mbit", "resnet", "local-topk", "gloo-adamw"),
    ("lstm-100-adamw", "accuracy_small_100Mbit", "lstm", "local-topk", "gloo-adamw"),
    ("resnet-100-adamw", "accuracy_small_100Mbit", "resnet", "local-topk", "gloo-adamw"),
    ("lstm-1g-adamw", "accuracy_small_1000Mbit", "lstm", "local-topk", "gloo-adamw"),
    ("resnet-1g-adamw", "accuracy_small_1000Mbit", "resnet", "local-topk", "gloo-adamw"),
):
    FIGURES |= {
        f"{_name}-s": loss_s(_file, _load, _ours),
        f"{_name}-sooner": sooner(_file, _load, _ours, _theirs),
    }
FIGURES["gpt-20-adamw-least"] = sooner(
    "accuracy_gpt_20Mbit_overlap", "gpt", "local-topk", "gloo-adamw", least=True
)
for _model in ("vgg16", "resnet20", "alexnet", "resnet50", "lstm_ptb"):
    for _P in (4, 8):
        FIGURES[f"paper-{_model}-p{_P}"] = efficiency(_model, _P, "gtopk")
    FIGURES[f"paper-{_model}-p8-gloo"] = efficiency(_model, 8, "gloo")
    FIGURES[f"paper-{_model}-p8-published"] = published(_model, 8, "gtopk")
for _storm in ("5", "30"):
    _file = f"chaos_every{_storm}"
    FIGURES[f"chaos-{_storm}-kept"] = kept(_file)
    FIGURES[f"chaos-{_storm}-faults"] = faults(_file)
for _kind in ("kill", "stop", "cut"):
    FIGURES[f"chaos-5-{_kind}"] = storm("chaos_every5", _kind, "stall_median_s")
    FIGURES[f"chaos-5-{_kind}-worst"] = storm("chaos_every5", _kind, "stall_worst_s")
for _name, _schedule in (("fill", "fill-drain"), ("1f1b", "1F1B")):
    FIGURES[f"memory-{_name}"] = peak_mib(_schedule, False)
    FIGURES[f"memory-{_name}-again"] = peak_mib(_schedule, True)
for _name, _case, _ours in (
    ("m8", "1 Gbit/s-8", "lan8"),
    ("m24", "1 Gbit/s-24", "lan24"),
    ("fast16", "100 Mbit/s, 5 ms-16", "fast16"),
):
    FIGURES[f"torch-{_name}"] = step_ratio("runtime", (f"torch-{_case}",), _ours)
for _M in (8, 16, 24):
    FIGURES[f"pipeline-ideal-m{_M}-ms"] = ideal_ms(f"lan{_M}")
FIGURES["speedup-m24"] = step_ratio("runtime", ("alone",), "lan24")
for _case in ("lan8", "fast16"):
    FIGURES[f"pipeline-{_case}"] = ideal_share("runtime", _case)
    FIGURES[f"pipeline-{_case}-ms"] = step_ms("runtime", _case)
FIGURES["pipeline-m24"] = ideal_share("runtime", "lan24")
FIGURES["pipeline-m24-ms"] = step_ms("runtime", "lan24")


@cache
def record(name: str) -> Any:
    """The record `name`.json; its numbers are strings, with the digits that the file has."""
    text = (RECORDED / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text, parse_float=str, parse_int=str)


def value_of(name: str) -> str:
    """Value of a figure; KeyError or FileNotFoundError if it has no source."""
    file, _, key = name.partition(":")
    return str(record(file)["figures"][key]) if key else FIGURES[name]()


def filled(text: str) -> str:
    """`text` with the value of each figure from its result file."""
    return MARK.sub(lambda mark: f"<!--={mark['name']}-->{value_of(mark['name'])}<!--/-->", text)


def main(arguments: list[str]) -> int:
    if "--list" in arguments:
        recorded = [
            f"{path.stem}:{key}"
            for path in sorted(RECORDED.glob("*.json"))
            for key in record(path.stem)["figures"]
        ]
        for name in (*FIGURES, *recorded):
            print(f"{name:40} {value_of(name)}")
        return 0
    differing = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new == text:
            continue
        differing += 1
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)} differs from benchmarks/results: run `python docs/figures.py`")
        else:
            page.write_text(new, encoding="utf-8")
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
