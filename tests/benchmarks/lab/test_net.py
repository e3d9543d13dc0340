"""The lab: hosts, rates, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
from lab_transfer import DEADLINE_S, send

from gridtrain.network.transport.rate_limiter import parse_rate
from lab import net as lab_net
from lab import ns
from lab.net import Net
from lab.ns import LabError

BENCHMARKS = Path(lab_net.__file__).parents[1]


def wait_for_line(pipe: IO[str] | None) -> str:
    assert pipe is not None
    ready, _, _ = select.select([pipe], [], [], DEADLINE_S)
    assert ready, "no line was received"
    return pipe.readline()


# -- hosts ---------------------------------------------------------------------------------------


def test_hosts_reach_each_other(net: Net) -> None:
    hosts = [net.host(name) for name in ("anna", "bert", "cleo")]
    assert [host.address for host in hosts] == ["10.77.0.2", "10.77.0.3", "10.77.0.4"]
    for sender in hosts:
        for receiver in hosts:
            send(sender, receiver, 10_000)  # to itself over lo


def test_hosts_have_only_their_own_interfaces(net: Net) -> None:
    anna = net.host("anna")
    assert anna.inside(lambda: [name for _, name in socket.if_nameindex()]) == ["lo", "eth0"]


def test_nothing_outside_the_lab_can_be_reached(net: Net) -> None:
    anna = net.host("anna")
    with pytest.raises(OSError, match="unreachable"):
        anna.dial("192.0.2.1", 80)


def test_eight_hosts_take_less_than_two_seconds(net: Net) -> None:
    began_s = time.perf_counter()
    for number in range(8):
        net.host(f"host-{number}")
    took_s = time.perf_counter() - began_s
    print(f"8 hosts in {took_s:.3f} s")
    assert took_s < 2


def test_a_process_sees_the_name_of_its_host(net: Net, tmp_path: Path) -> None:
    code = "import os, socket, sys; print(socket.gethostname(), os.environ); sys.exit(3)"
    environment = {"PATH": os.environ["PATH"], "COLOUR": "green"}
    process = net.host("anna").run([sys.executable, "-c", code], tmp_path, env=environment)
    assert process.wait(DEADLINE_S) == 3
    output = (tmp_path / "anna.out").read_text()
    assert output.startswith("anna ") and "'COLOUR': 'green'" in output and "HOME" not in output
    assert (tmp_path / "anna.err").read_text() == ""
    assert socket.gethostname() != "anna"


def test_two_labs_with_the_same_addresses_are_separate(lab: None) -> None:
    with Net() as one, Net() as two:
        anna, bert = one.host("anna"), two.host("bert")
        assert anna.address == bert.address == "10.77.0.2"
        cleo = one.host("cleo")
        with bert.listen(7700), pytest.raises(ConnectionRefusedError):
            cleo.dial("10.77.0.2", 7700)  # that is anna, which does not listen
        with anna.listen(7700):
            cleo.dial("10.77.0.2", 7700).close()


def test_a_second_host_of_the_same_name_is_refused(net: Net) -> None:
    net.host("anna")
    with pytest.raises(LabError, match="there already is a host 'anna'"):
        net.host("anna")


# -- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "seconds"), [("20Mbit", 1.0), ("100Mbit", 0.6)])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_rate_holds_within_15_percent(net: Net, rate: str, seconds: float, direction: str) -> None:
    """Of the rate of frames, at most 95 % are payload."""
    slow, fast = net.host("slow"), net.host("fast")
    slow.shape(**{direction: rate})
    sender, receiver = (slow, fast) if direction == "up" else (fast, slow)
    nbytes = int(parse_rate(rate) * seconds)
    share = nbytes / send(sender, receiver, nbytes) / parse_rate(rate)
    print(f"{rate} {direction}: {share:.1%} are payload")
    assert 0.85 < share < 1.15


def test_the_other_direction_is_not_slowed_down(net: Net) -> None:
    slow, fast = net.host("slow"), net.host("fast")
    slow.shape(up="5Mbit")
    nbytes = 2_000_000
    assert send(fast, slow, nbytes) < 0.5 * nbytes / parse_rate("5Mbit")


def test_a_router_s_rate_limits_the_hosts_behind_it(net: Net) -> None:
    hub, home = net.host("hub"), net.router("home")
    anna = home.host("anna")
    home.shape(up="20Mbit")
    nbytes = int(parse_rate("20Mbit"))
    assert 0.85 < send(anna, hub, nbytes) < 1.3


# -- nothing is left behind ------------------------------------------------------------------------


def test_nothing_is_left_after_an_exception(lab: None, tmp_path: Path) -> None:
    def own() -> set[str]:  # another part of the suite may have namespaces, too
        return {name for name in ns.existing() if name.startswith(f"{ns.PREFIX}{os.getpid()}.")}

    before = own()
    with pytest.raises(ZeroDivisionError), Net() as net:
        process = net.router("home").host("anna").run(["sleep", "1000"], tmp_path)
        assert len(own() - before) == 3
        _ = 1 / 0
    assert own() == before
    assert process.returncode == -signal.SIGTERM


def test_a_process_that_leaves_its_group_is_ended(lab: None, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    hiding = "setsid sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 1000; done' & wait"
    handle = os.open(tmp_path / "pid", os.O_RDWR)
    with Net() as net, os.fdopen(handle) as pids:
        net.host("anna").run(["sh", "-c", f"cd {shlex.quote(str(tmp_path))}; {hiding}"], tmp_path)
        pid = int(wait_for_line(pids))
        assert ns.alive(pid)
    assert not ns.alive(pid)


def wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as process:
        select.select([process], [], [], DEADLINE_S)


OWNER = """
import sys, threading
sys.path.insert(0, {benchmarks!r})
from lab.net import Net
from pathlib import Path
with Net() as net:
    anna = net.host("anna")
    process = anna.run(["sleep", "1000"], Path({folder!r}))
    print(anna.namespace, process.pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_is_left_after_a_signal(lab: None, tmp_path: Path, number: signal.Signals) -> None:
    """After SIGKILL the next lab removes the namespaces; those of a live owner are not removed before."""
    code = OWNER.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path))
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        try:
            namespace, pid = wait_for_line(owner.stdout).split()
            assert ns.sweep() == [] and namespace in ns.existing()
            assert ns.alive(int(pid))
        finally:
            owner.send_signal(number)
            owner.wait(DEADLINE_S)
    if number == signal.SIGKILL:
        assert namespace in ns.existing()
        with contextlib.suppress(LabError), Net():
            pass
    assert namespace not in ns.existing()
    wait_for_end(int(pid))  # another part of the suite may have removed the namespace just now
    assert not ns.alive(int(pid))


# -- requirements ----------------------------------------------------------------------------------


def test_missing_requirements_are_reported(lab: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab_net.why_not() == ""

    def reason() -> str:
        return lab_net.why_not.__wrapped__()

    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert reason() == "not root: network namespaces need it"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        assert reason().startswith("there is no command 'ip' (on Debian or Ubuntu: apt install iproute2")
    with monkeypatch.context() as patch:
        which = shutil.which
        patch.setattr(shutil, "which", lambda name: None if name == "iptables" else which(name))
        assert reason().startswith("there is no command 'iptables'")
    with monkeypatch.context() as patch:
        patch.setattr("lab.net.BRIDGE", "a-name-that-is-too-long")
        assert "a-name-that-is-too-long" in reason(), (
            "the error of the kernel or a command is part of the reason"
        )
