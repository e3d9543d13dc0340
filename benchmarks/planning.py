"""How long the coordinator plans, and with how much memory: it answers nobody meanwhile.

Decides the group that is planned: round trips to 256 peers and rates to 8 of each member, both drawn.  Never
uses a network.  CPU time of one process; memory is the most that it ever held, so run big groups last.

Run:  python benchmarks/planning.py [--members 64,128,1000] [--exchanges dense,topk,gtopk,star]
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from gridtrain.core.planning import rank_order
from gridtrain.core.planning.rank_order import LinkMeasurements
from gridtrain.core.planning.workload import ExchangeKind, Workload

ROUND_TRIPS_s = (0.002, 0.02, 0.05, 0.1)
RATES_Bps = (1e5, 1e6, 2.5e6, 12.5e6, 125e6)
PROBED, SENT_TO, PARAMETERS = 256, 8, 25_600_000


def group(members: int, seed: int) -> tuple[list[bytes], LinkMeasurements]:
    rng = random.Random(seed)
    peers = [index.to_bytes(2, "big") * 16 for index in range(members)]
    rtt_s: dict[tuple[bytes, bytes], float] = {}
    measured = LinkMeasurements(rtt_s)
    for peer in peers:
        for other in rng.sample(peers, min(PROBED, members)):
            if other != peer:
                rtt_s[peer, other] = rng.choice(ROUND_TRIPS_s)
        for other in rng.sample(peers, min(SENT_TO, members)):
            if other != peer:
                rate_Bps = rng.choice(RATES_Bps)
                measured.record(peer, [(other, rate_Bps, 0.0)])
                measured.record(other, [(peer, 0.0, rate_Bps)])
    return peers, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", default="8,32,64,128,1000")
    parser.add_argument("--exchanges", default="dense,topk,gtopk,star")
    chosen = parser.parse_args()
    for members in map(int, chosen.members.split(",")):
        peers, measured = group(members, seed=1)
        for name in chosen.exchanges.split(","):
            load = Workload(ExchangeKind(name), PARAMETERS)
            began_s = time.process_time()
            made = rank_order.plan_rank_order(load, measured, peers, peers)
            planned_s = time.process_time()
            rank_order.reorder_reason(load, measured, made.order, peers)
            compared_s = time.process_time()
            most_MiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"{members:>5} members, {name:<6} plan {planned_s - began_s:.2f} s, "
                f"compared {compared_s - planned_s:.2f} s, at most {most_MiB} MiB"
            )


if __name__ == "__main__":
    main()
