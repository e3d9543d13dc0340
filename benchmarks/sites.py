"""Compares the planned order of ranks with the order of joining, on links with different rates.

The workers join one after the other in the worst order.  Members measure their links, and the coordinator
plans the order of ranks.

    sites    two sites of P / 2 workers, 1 Gbit/s inside, a thin link between; workers of both join in turn
             worker-1 3 5 --lan A== router ==thin== internet ==thin== router ==lan B-- worker-2 4 6
    home     one worker at home among workers of a LAN; the one at home joins first
             worker-1 ==20 Mbit/s, 20 ms==+==1 Gbit/s== worker-2 3 4 5
    thin     four workers with 100 Mbit/s and 20 ms, one of which has 5 Mbit/s up and joins last: in the order
             of joining all select k entries, in the planned order it selects fewer (docs/exchanges.md)

Each order has its own group, and the groups take turns.  The result is the median of the exchanges in the
last generation; the coordinator's reason for its plan is printed.

Run (root):  python benchmarks/sites.py [--cases sites home] [--repeats 5] [--out FILE]
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import record
from gridtrain.tools.bench.bench_group import BenchSetting, start_group
from gridtrain.tools.child_processes import CLI_COMMAND
from lab.group import LabHosts
from lab.net import Host, Net
from lab.ns import LabError, command

JOIN_S, PLANNED_S = 60.0, 70.0
POLL_S = 0.5
MEMBER = "gridtrain.tools.bench.bench_member"


@dataclass(frozen=True, slots=True)
class Case:
    """A network with different links, and an exchange."""

    name: str
    exchange: str
    workers: int
    n: int


CASES = {
    "sites": (
        Case("sites", "dense", 6, 1_000_000),
        Case("sites", "gtopk:density=0.01", 6, 10_000_000),
    ),
    "home": (
        Case("home", "gtopk:density=0.01", 5, 10_000_000),
        Case("home", "gtopk:topology=star,density=0.01", 5, 10_000_000),
    ),
    "thin": (
        Case("thin", "gtopk:density=0.01", 4, 10_000_000),
        Case("thin", "gtopk:topology=tree,density=0.01", 4, 10_000_000),
        Case("thin", "gtopk:topology=star,density=0.01", 4, 10_000_000),
    ),
}
THIN, FAST, WAY_S = "20Mbit", "1Gbit", 0.01
WIDE, THIN_UPLOAD = "100Mbit", "5Mbit"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an order: the duration of each exchange, and the coordinator's reason for its plan."""

    case: Case
    order: str
    seconds: tuple[float, ...]
    plan: str

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


class UnevenHosts(LabHosts):
    """Hosts with different links, whose workers join one after the other.

    Args:
        state: the coordinator's folder.
    """

    def __init__(self, net: Net, case: Case, state: Path) -> None:
        super().__init__(net, [])
        make = {"sites": _two_sites, "home": _one_at_home, "thin": _one_thin_upload}[case.name]
        self.workers = make(net, self.hub, [f"worker-{number}" for number in range(1, case.workers + 1)])
        self.state = state

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        if MEMBER in argv and who != "worker-1":
            self._until_joined(int(who.removeprefix("worker-")) - 1)
        return super().run(who, argv, log, env)

    def status(self) -> dict[str, object]:
        """Return the output of `gridtrain status`.  Raises `LabError`."""
        text = self.hub.command(*CLI_COMMAND, "status", "--state", str(self.state), "--json")
        status: dict[str, object] = json.loads(text)
        return status

    def _until_joined(self, count: int) -> None:
        until_s = time.monotonic() + JOIN_S
        while time.monotonic() < until_s:
            workers = self.status()["members"]
            assert isinstance(workers, list)
            if len(workers) >= count:
                return
            time.sleep(POLL_S)
        raise LabError(f"worker {count} did not join within {JOIN_S:g} s")


def _two_sites(net: Net, hub: Host, names: Sequence[str]) -> dict[str, Host]:
    sites = [net.router(f"site{number}", translate=False) for number in (1, 2)]
    for site, other in itertools.permutations(sites):
        command("ip", "-n", site.namespace, "route", "add", f"{other.subnet}.0/24", "via", other.address)
    for site in sites:
        command("ip", "-n", hub.namespace, "route", "add", f"{site.subnet}.0/24", "via", site.address)
        site.shape(up=THIN, down=THIN, delay_s=WAY_S / 2)
    found = {name: sites[number % 2].host(name) for number, name in enumerate(names)}
    for host in found.values():
        host.shape(up=FAST, down=FAST)
    return found


def _one_at_home(net: Net, hub: Host, names: Sequence[str]) -> dict[str, Host]:
    home, *others = names
    return net.make_hosts([home], THIN, 2 * WAY_S) | net.make_hosts(others, FAST)


def _one_thin_upload(net: Net, hub: Host, names: Sequence[str]) -> dict[str, Host]:
    found = net.make_hosts(names, WIDE, WAY_S)
    found[names[-1]].shape(up=THIN_UPLOAD)
    return found


def measure(case: Case, order: str, repeats: int) -> Outcome:
    """Measure one group: exchanges until the coordinator has planned with all measurements, then `repeats`.

    Raises `LabError`, `GridtrainError`.
    """
    with tempfile.TemporaryDirectory(prefix="sites-") as text, Net() as net:
        folder = Path(text, "g")
        hosts = UnevenHosts(net, case, folder / "hub")
        setting = BenchSetting(case.exchange, case.workers, case.n, order=order)
        with start_group(setting, hosts, folder) as group:
            until_s = time.monotonic() + PLANNED_S
            for _ in range(2):
                group.repeat()
            while order == "planned" and time.monotonic() < until_s and hosts.status()["generation"] == 1:
                group.repeat()
            seconds = [group.repeat().seconds for _ in range(repeats)]
            plan = str(hosts.status().get("plan_reason", ""))
    return Outcome(case, order, tuple(seconds), plan)


def table(outcomes: Sequence[Outcome]) -> str:
    by_case: dict[Case, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_case.setdefault(outcome.case, {})[outcome.order] = outcome
    rows = []
    for case, found in by_case.items():
        if set(found) == {"joined", "planned"}:
            times_s = [found[order].median_s for order in ("joined", "planned")]
            cells = [f"{seconds:.3f} s" for seconds in times_s]
            gain = f"{times_s[0] / times_s[1]:.2f}"
            rows.append((case.name, case.exchange, case.workers, f"{case.n:,}", *cells, gain))
    heads = ("network", "exchange", "P", "n", "by joining", "planned", "times as fast")
    return record.table(heads, rows)


def main(arguments: Sequence[str]) -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    chosen = (case for name in options.cases for case in CASES[name])
    for case, order in itertools.product(chosen, ("joined", "planned")):
        outcome = measure(case, order, options.repeats)
        outcomes.append(outcome)
        print(f"{case.name}, {case.exchange}, {order}: {outcome.median_s:.3f} s; {outcome.plan}", flush=True)
        record.write(options.out, arguments, outcomes=[asdict(each) for each in outcomes])
    print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
