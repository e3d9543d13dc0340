"""A coordinator and its workers, each on its own host, some behind home routers.

    hub        gridtrain coordinator --state FOLDER --listen tcp://0.0.0.0:7700 --advertise tcp://10.77.0.2:7700
    hub        gridtrain invite --state FOLDER --uses P                 prints INVITE
    worker-1   gridtrain worker INVITE -- python train.py               behind its own router, or not
    ...

Each worker behind NAT has its own router, and all these homes have the same private addresses, as real homes
often do: a connection to a member's private address never reaches another home.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lab.environment import environment
from lab.net import Host, Net, Process
from lab.ns import LabError

CLI = (sys.executable, "-m", "gridtrain.cli")
PORT = 7700
HOME_SUBNET = "192.168.178"
UP_S = 30
TICK_S = 0.1
TAIL_LINES = 20
NAT = ("none", "half", "all")


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a group.

    Attributes:
        nat: which workers are behind a router: "none", "half" (the first ones, rounded up) or "all".
        encrypted: whether the coordinator requires encryption.
        cap: the workers' own upload and download limit, such as "20Mbit"; empty: none.
        link_rate: the rate of each worker's link (behind NAT, its router's) per direction; empty: no limit.
        delay_s: the delay of a packet to a worker.
        names: names of the workers and their hosts; their machines' host names are "NAMEs-laptop".
        relay: which peers may relay: "members", or "hub" for the coordinator alone.
        late: the number of workers for which training does not wait, as their scripts join later.
        environment: further variables of all processes.
    """

    workers: int = 4
    nat: str = "none"
    encrypted: bool = True
    cap: str = ""
    link_rate: str = ""
    delay_s: float = 0.0
    names: tuple[str, ...] = ()
    relay: str = "members"
    late: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nat not in NAT:
            raise ValueError(f"nat is {self.nat!r}; it must be one of {', '.join(NAT)}")

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names or tuple(f"worker-{number}" for number in range(1, self.workers + 1))

    @property
    def behind_nat(self) -> frozenset[str]:
        count = {"none": 0, "half": (self.workers + 1) // 2, "all": self.workers}[self.nat]
        return frozenset(self.all_names[:count])


@dataclass(slots=True)
class Group:
    """A started group.

    Attributes:
        uplinks: for each worker, the machine whose link leads to the internet: its host or its router.
    """

    folder: Path
    hub: Host
    coordinator: Process
    invitation: str
    hosts: dict[str, Host] = field(default_factory=dict)
    uplinks: dict[str, Host] = field(default_factory=dict)
    workers: dict[str, Process] = field(default_factory=dict)

    def state(self, name: str) -> Path:
        """Return the state folder (XDG_STATE_HOME) of a worker, or with "hub" of the coordinator."""
        return self.folder / f"state-{name}"

    def wait(self, timeout_s: float, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all workers and the coordinator have ended with exit code 0; call `tick` meanwhile.

        Raises `LabError` with the ends of the logs if one fails or they take longer.
        """
        waiting = {**self.workers, "hub": self.coordinator}
        until_s = time.monotonic() + timeout_s
        while waiting:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise LabError(f"{', '.join(waiting)} still run after {timeout_s:g} s\n{self.tails()}")
            _until_one_ends(list(waiting.values()), min(left_s, TICK_S))
            tick()
            for name, process in list(waiting.items()):
                if process.poll() is not None:
                    del waiting[name]
                    if process.returncode:
                        raise LabError(f"{name} ended with exit code {process.returncode}\n{self.tails()}")

    def tails(self) -> str:
        return "\n".join(_tail(name, p) for name, p in {"hub": self.coordinator, **self.workers}.items())


def start(net: Net, plan: Plan, folder: Path, script: Callable[[str], Sequence[str]]) -> Group:
    """Make the hosts, and start the coordinator and the workers.

    Args:
        script: returns the training command of a worker.

    Raises `LabError` with the ends of the logs.
    """
    hub = net.host("hub")
    address = f"tcp://{hub.address}:{PORT}"
    group = Group(folder, hub, _coordinator(hub, plan, folder, address), "")
    _place(net, plan, group)
    group.invitation = _invitation(group, plan)
    for name, host in group.hosts.items():
        argv = (*CLI, "worker", group.invitation, *_worker_options(plan, name, folder), "--", *script(name))
        env = _environment(plan, group.state(name))
        group.workers[name] = host.run(argv, folder, env=env, hostname=hostname(name))
    return group


def hostname(name: str) -> str:
    """Return the host name of a worker's machine."""
    return f"{name}s-laptop"


def _place(net: Net, plan: Plan, group: Group) -> None:
    for name in plan.all_names:
        if name in plan.behind_nat:
            router = net.router(f"home-of-{name}", subnet=HOME_SUBNET)
            group.hosts[name], group.uplinks[name] = router.host(name), router
        else:
            group.hosts[name] = group.uplinks[name] = net.host(name)
        group.uplinks[name].shape(up=plan.link_rate, down=plan.link_rate, delay_s=plan.delay_s or None)


# -- commands ------------------------------------------------------------------------------------


def _worker_options(plan: Plan, name: str, folder: Path) -> list[str]:
    options = ["--name", name, "--export-dir", str(folder)]
    if plan.cap:
        options += ["--upload-limit", plan.cap, "--download-limit", plan.cap]
    if plan.relay == "hub":
        options += ["--no-relay"]
    if not plan.encrypted:
        options += ["--unencrypted"]
    return options


def _coordinator(hub: Host, plan: Plan, folder: Path, address: str) -> Process:
    place = ("--listen", f"tcp://0.0.0.0:{PORT}", "--advertise", address)
    ends = ("--min-workers", str(plan.workers - plan.late), "--exit-when-finished")
    state = folder / "state-hub"
    state.mkdir(parents=True, mode=0o700)
    clear = () if plan.encrypted else ("--unencrypted", "--benchmark")
    argv = (*CLI, "coordinator", "--state", str(state), *place, *ends, *clear)
    return hub.run(argv, folder, env=_environment(plan, state))


def _invitation(group: Group, plan: Plan) -> str:
    """Return an invitation for the workers; wait until the coordinator creates it."""
    state = group.state("hub")
    argv = (*CLI, "invite", "--state", str(state), "--uses", str(plan.workers), "--wait", f"{UP_S}s")
    process = group.hub.run(argv, group.folder, env=_environment(plan, state), log="invite")
    _until_one_ends([process, group.coordinator], 2 * UP_S)
    if process.poll() != 0:
        raise LabError(f"`gridtrain invite` failed\n{_tail('invite', process)}\n{group.tails()}")
    return process.stdout_path.read_text().strip()


def _environment(plan: Plan, state: Path) -> dict[str, str]:
    return environment(state, **{"MKL_NUM_THREADS": "1", **plan.environment})


# -- waiting -------------------------------------------------------------------------------------


def _until_one_ends(processes: Sequence[Process], timeout_s: float) -> None:
    with ExitStack() as handles:
        ends = select.poll()
        for process in processes:
            handle = os.pidfd_open(process.pid)
            handles.callback(os.close, handle)
            ends.register(handle, select.POLLIN)
        ends.poll(timeout_s * 1000)


def _tail(name: str, process: Process) -> str:
    texts = [path.read_text(errors="replace") for path in (process.stdout_path, process.stderr_path)]
    lines = [line for text in texts for line in text.splitlines()[-TAIL_LINES:]]
    return "\n".join([f"--- {name}, exit code {process.poll()}, the end of its output:", *lines])
