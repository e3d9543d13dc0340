"""Predicts the scaling efficiencies in the table of the gTop-k paper with gridtrain's exchanges.

Nothing is trained: the cost model (`core.planning`) is evaluated for the paper's link, with alpha and beta as
its authors fitted them, and CPU costs of this machine.

    paper      throughput at P / throughput at 1          data/gtopk_icdcs2019.json (arXiv 1901.04359)
    predicted  compute / (compute + selection + exchange), compute = batch / throughput at 1

The batches of four models are in the paper's breakdown.  The unit of LSTM-PTB is not given; its batch is
taken as 100 units.  The paper computes on a P102-100, where selection would run, too; here it is that of a
CPU, which takes longer, unless --select-ns has the GPU's time.

Then Baidu's ring is compared with a single reducer: 31 times as fast on 40 GPUs as on one
(research.baidu.com, "Bringing HPC Techniques to Deep Learning", 2017).  The time of computing with which a
ring reaches 31 is calculated, and the single reducer is predicted for it.

Run:  python benchmarks/paper_table.py [--quick] [--cpu FILE]      (FILE: output of calibrate.py)
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate import measure
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.exchange_comparison import estimate_exchange
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload

DATA = Path(__file__).parent / "data" / "gtopk_icdcs2019.json"
MODELS = {
    "vgg16": ("vgg16_cifar", 128),
    "resnet20": ("resnet20", 128),
    "alexnet": ("alexnet", 64),
    "resnet50": ("resnet50", 256),
    "lstm_ptb": ("lstm_ptb", 100),
}
COLUMNS = (("dense", ExchangeKind.DENSE), ("topk", ExchangeKind.TOPK), ("gtopk", ExchangeKind.GTOPK))
SIZES = (4, 8, 16, 32)
GOAL = 0.90
BAIDU_GPUS, BAIDU_SPEEDUP, BAIDU_PARAMETERS = 40, 31.0, 300_000_000


def read_cpu(path: Path) -> CpuCosts:
    return CpuCosts(**json.loads(path.read_text(encoding="utf-8")))


def efficiencies(paper: dict[str, Any], cpu: CpuCosts) -> list[dict[str, Any]]:
    """Return a prediction for each model, exchange and P."""
    link = paper["link"]
    found = []
    for model, (parameters_of, batch) in MODELS.items():
        throughput = paper["throughput"][model]
        compute_s = batch / throughput["P1"]
        parameters = round(paper["parameters"][parameters_of])
        for name, kind in COLUMNS:
            for size in SIZES:
                network = uniform_network(size, link["alpha_s"], 1 / link["beta_s_per_byte"])
                load = Workload(kind, parameters, paper["density"], encrypted=False)
                estimate = estimate_exchange(load, network, cpu, compute_s)
                found.append(
                    {
                        "model": model,
                        "exchange": name,
                        "workers": size,
                        "compute_s": compute_s,
                        "paper": throughput[name][str(size)] / throughput["P1"],
                        "predicted": estimate.efficiency,
                        "exchange_s": estimate.cost.exchange_s,
                        "select_s": estimate.cost.select_s,
                    }
                )
    return found


def markdown(found: list[dict[str, Any]]) -> str:
    """Return a table with "paper / predicted" in percent."""
    at = {(each["model"], each["exchange"], each["workers"]): each for each in found}
    lines = [
        "| model | exchange | " + " | ".join(f"P = {size}" for size in SIZES) + " |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for model in MODELS:
        for name, _ in COLUMNS:
            cells = [at[model, name, size] for size in SIZES]
            shown = " | ".join(f"{each['paper']:.1%} / {each['predicted']:.1%}" for each in cells)
            lines.append(f"| {model} | {name} | {shown} |")
    return "\n".join(lines)


def baidu(cpu: CpuCosts, link: dict[str, float]) -> dict[str, float]:
    """Return the speed-ups of a ring, which is Baidu's, and of a single reducer over one worker."""
    network = uniform_network(BAIDU_GPUS, link["alpha_s"], 1 / link["beta_s_per_byte"])
    ring, star = (
        exchange_cost(Workload(kind, BAIDU_PARAMETERS, encrypted=False), network, cpu)
        for kind in (ExchangeKind.DENSE, ExchangeKind.STAR)
    )
    share = BAIDU_SPEEDUP / BAIDU_GPUS
    compute_s = ring.exchange_s * share / (1 - share)
    return {
        "compute_s": compute_s,
        "ring_s": ring.exchange_s,
        "star_s": star.exchange_s,
        "ring": BAIDU_GPUS * compute_s / (compute_s + ring.exchange_s),
        "star": BAIDU_GPUS * compute_s / (compute_s + star.exchange_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a shorter calibration")
    parser.add_argument("--cpu", type=Path, help="output of calibrate.py, instead of measuring now")
    parser.add_argument("--select-ns", type=float, help="of selection for one parameter, as on a GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cpu = read_cpu(options.cpu) if options.cpu else measure(quick=options.quick)
    if options.select_ns is not None:
        cpu = replace(cpu, select_parameter_s=options.select_ns * 1e-9)
    paper = json.loads(DATA.read_text(encoding="utf-8"))
    found = efficiencies(paper, cpu)
    rings = baidu(cpu, paper["link"])
    if options.json:
        print(json.dumps({"table": found, "baidu": rings}, indent=1))
        return
    print(f"Scaling efficiency, paper / predicted ({paper['source']})\n")
    print(markdown(found))
    last = [each for each in found if each["exchange"] == "gtopk" and each["workers"] == 32]
    reached = [each["model"] for each in last if each["predicted"] >= GOAL]
    missed = [f"{each['model']} ({each['predicted']:.0%})" for each in last if each["predicted"] < GOAL]
    print(f"\ngTop-k at P = 32, goal {GOAL:.0%}: reached by {', '.join(reached) or 'none'}", end="")
    print(f"; missed by {', '.join(missed)}" if missed else "")
    print(
        f"\n{BAIDU_GPUS} workers, {BAIDU_PARAMETERS / 1e6:.0f} M parameters, the same link: if a ring is "
        f"{rings['ring']:.1f} times as fast as one worker ({rings['compute_s']:.1f} s of computing, "
        f"{rings['ring_s']:.1f} s of exchange), a single reducer is {rings['star']:.1f} times as fast "
        f"({rings['star_s']:.1f} s of exchange)"
    )


if __name__ == "__main__":
    main()
