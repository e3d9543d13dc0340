"""Predicts the scaling efficiencies in the table of the gTop-k paper with gridtrain's exchanges.

Nothing is trained: the cost model (`core.planning`) is evaluated for the paper's link, with alpha and beta as
its authors fitted them, and CPU costs of this machine.  `emulated.py paper` measures the same models.

    paper      throughput at P / throughput at 1          data/gtopk_icdcs2019.json (arXiv 1901.04359)
    predicted  compute / (compute + selection + exchange), compute = batch / throughput at 1

The batches of four models are in the paper's breakdown.  The unit of LSTM-PTB is not given; its batch is
taken as 100 units.  The paper computes on a P102-100, where selection would run, too; here it is that of a
CPU, which takes longer.

Run:  python benchmarks/paper.py [--cpu FILE]      (default: results/cpu.json)
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import record
from calibrate import CPU, read_cpu
from gridtrain.core.planning.exchange_recommendation import estimate_exchange
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
"""The name of the model's size, and the batch."""

EXCHANGES = {"dense": ExchangeKind.DENSE, "topk": ExchangeKind.TOPK, "gtopk": ExchangeKind.GTOPK}
SIZES = (4, 8, 16, 32)
GOAL = 0.90


def efficiencies(paper: dict[str, Any], cpu: CpuCosts) -> list[dict[str, Any]]:
    """Return a prediction for each model, exchange and P."""
    link, found = paper["link"], []
    for (model, (parameters_of, batch)), (name, kind), size in product(
        MODELS.items(), EXCHANGES.items(), SIZES
    ):
        throughput = paper["throughput"][model]
        compute_s = batch / throughput["P1"]
        network = uniform_network(size, link["alpha_s"], 1 / link["beta_s_per_byte"])
        parameters = round(paper["parameters"][parameters_of])
        load = Workload(kind, parameters, paper["density"], encrypted=False)
        estimate = estimate_exchange(load, network, cpu, compute_s)
        published = throughput[name][str(size)] / throughput["P1"]
        row = {"model": model, "exchange": name, "workers": size, "paper": published}
        found.append(row | {"predicted": estimate.efficiency})
    return found


def markdown(found: list[dict[str, Any]]) -> str:
    """Return a table with "paper / predicted" in percent."""
    shown = {
        (each["model"], each["exchange"], each["workers"]): f"{each['paper']:.1%} / {each['predicted']:.1%}"
        for each in found
    }
    rows = [
        (model, name, *(shown[model, name, size] for size in SIZES))
        for model, name in product(MODELS, EXCHANGES)
    ]
    return record.table(("model", "exchange", *(f"P = {size}" for size in SIZES)), rows)


def main() -> None:
    parser = record.parser(__doc__, out="")
    parser.add_argument("--cpu", type=Path, default=CPU, help="what calibrate.py printed")
    options = parser.parse_args()
    paper = json.loads(DATA.read_text(encoding="utf-8"))
    found = efficiencies(paper, read_cpu(options.cpu))
    print(f"Scaling efficiency, paper / predicted ({paper['source']})\n\n{markdown(found)}")
    last = [each for each in found if each["exchange"] == "gtopk" and each["workers"] == 32]
    reached = [each["model"] for each in last if each["predicted"] >= GOAL]
    print(f"\ngTop-k at P = 32, goal {GOAL:.0%}: reached by {', '.join(reached) or 'none'}")


if __name__ == "__main__":
    main()
