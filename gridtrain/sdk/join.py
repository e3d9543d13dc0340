"""`gridtrain.join()`: makes a `Grid` from arguments, environment variables and run.toml.

invitation --enroll--> identity, coordinator --+
arguments, GRIDTRAIN_*, run.toml --> JoinConfig --> _Connector: a transport, and another after each pause
                                                          |
                                                          v
                                                        Grid
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from gridtrain._version import SOFTWARE
from gridtrain.config import Deadlines, JoinConfig
from gridtrain.core.group.invitation import parse
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.fault_injection import Faults
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.network.transport.stack import build_stack
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.runtime.client.agent_link import CONTROL_VARIABLE, AgentLink
from gridtrain.runtime.client.coordinator_client import parse_coordinator_address
from gridtrain.runtime.client.enrollment import enroll
from gridtrain.runtime.client.worker_defaults import name_of_key
from gridtrain.runtime.process_hooks import install_error_hook
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.reported_figures import check_names
from gridtrain.tools.options.resolve import join_settings
from gridtrain.tools.options.runfile import RunFile

log = logging.getLogger("gridtrain")


def join(
    invitation: str | None = None,
    *,
    name: str | None = None,
    listen: str | None = None,
    advertise: str | None = None,
    upload_limit: str | None = None,
    download_limit: str | None = None,
    export_dir: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
    checkpoints: str | None = None,
    handover_mib: int | None = None,
    state_dir: str | None = None,
    relay: bool | None = None,
    unencrypted: bool | None = None,
) -> Grid:
    """Join a run.

    Arguments that are not given are read from the environment variables `GRIDTRAIN_*`, which
    `gridtrain worker` sets; in a script that was started by hand, they are also read from run.toml.

    Args:
        invitation: the string "gridtrain1:..." from the run's owner; not needed under `gridtrain worker`.
        name: the name of this worker, which the other workers can see; by default a name that is derived from
            its key.
        listen: the address to which peers connect, "tcp://interface:port"; port 0 uses any free port.  The
            default is a free port on the interface that leads to the coordinator.
        advertise: the address that is announced to peers, if it differs from `listen`.
        upload_limit, download_limit: rates such as "20Mbit"; they also apply to relayed traffic.
        export_dir: the folder to which the first worker writes the final model; the state directory by
            default.
        checkpoint_every: the number of steps between two checkpoints on this worker's disk, 500 by default; 0
            writes none.  A run that all workers have left continues from the latest checkpoint of a worker
            that returns.
        checkpoint_keep: the number of checkpoints to keep, 2 by default.
        checkpoints: a URL such as "s3://bucket/run", to which checkpoints are also uploaded; this worker
            continues from the latest one there if its disk has no later one.  See docs/operations.md.
        handover_mib: the maximum size in MiB of the residual that this worker sends to another worker when it
            leaves before the end, the largest values first; 16 by default, which is also the upper limit.
        state_dir: the folder for checkpoints; by default, a folder for this worker in the state directory.
        relay: whether to forward messages between two members that cannot reach each other; the messages are
            encrypted end to end.  True by default.
        unencrypted: whether to disable encryption, for benchmarks; the coordinator must also disable it.

    Raises:
        ConfigError: an argument or variable is malformed, there is no invitation, or a child process of
            multiprocessing imports the script.
        CoordinatorUnreachable: the coordinator did not answer in time.
        JoinRefused: the coordinator refused this worker; the message says why.
    """
    install_error_hook()
    children = sys.modules.get("multiprocessing.process")  # imported in each child process
    if children is not None and getattr(children.current_process(), "_inheriting", False):
        raise ConfigError(
            "gridtrain.join() was called while a child process, such as a reader of data, imports the script",
            remedy='call it under `if __name__ == "__main__":`, or use the start method "fork"',
        )
    arguments: dict[str, str | None] = {
        "name": name or None,
        "listen": listen,
        "advertise": advertise,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
        "export_dir": export_dir,
        "checkpoint_every": None if checkpoint_every is None else str(checkpoint_every),
        "checkpoint_keep": None if checkpoint_keep is None else str(checkpoint_keep),
        "checkpoints": checkpoints,
        "handover_mib": None if handover_mib is None else str(handover_mib),
        "state_dir": state_dir,
        "relay": None if relay is None else "yes" if relay else "no",
        "unencrypted": "yes" if unencrypted else None,
    }
    if "GRIDTRAIN_COORDINATOR" not in os.environ:  # otherwise the agent has read run.toml
        arguments |= join_settings(arguments, os.environ, RunFile.find(os.environ))
    with ExitStack() as resources:
        if invitation is not None:
            entry = resources.enter_context(
                enroll(
                    parse(invitation),
                    Deadlines().connect_s,
                    unencrypted=arguments["unencrypted"] == "yes",
                )
            )
            arguments |= entry.join_options()
        config = JoinConfig.from_environment(None, **arguments)
        config = replace(config, coordinator=parse_coordinator_address(config.coordinator))
        identity = Identity.read(Path(config.identity))
        config = replace(config, name=config.name or name_of_key(identity.public))
        check_names(config)
        connector = _Connector(config, identity)
        transport, allowlist = connector.connect()
        _warn_of_open_grid(config)
        try:
            grid = Grid(transport, config, allowlist, connector.faults)
        except JoinRefused as refusal:
            if refusal.code == "finished" and CONTROL_VARIABLE in os.environ:
                refusal.exit_code = 0  # the run, which the agent checked, has ended while the script started
            raise
        open_here = _place(config), grid, config.name
        _open.append(open_here)
        resources.callback(_open.remove, open_here)
        if control := os.environ.get(CONTROL_VARIABLE):
            agent = AgentLink(control, grid.moved_bytes, grid.why_waiting)
            grid.led_by(agent, connector.connect, connector.set_rate_limits)
        grid.resources = resources.pop_all()  # the identity is this worker's until its grid is closed
        return grid


_open: list[tuple[tuple[int, int, str], Grid, str]] = []
"""The open grids that `join` has made: (process, thread, run), the grid, and the worker's name."""


def _place(config: JoinConfig) -> tuple[int, int, str]:
    return os.getpid(), threading.get_ident(), config.coordinator_key


def _warn_of_open_grid(config: JoinConfig) -> None:
    """Warn if this thread, such as the thread of a notebook whose cells are run again, holds another worker
    of the run: that worker's loop cannot run while this thread runs the new worker's, but the group waits for
    it."""
    for place, grid, name in list(_open):
        if place == _place(config) and not grid.finished:
            log.warning(
                'this script still holds the worker %s of the run "%s", for which the new one will wait -> '
                "call grid.close() before gridtrain.join(); if no variable refers to that grid, restart the "
                "notebook's kernel or the script",
                *(name, config.run),
            )


class _Connector:
    """Creates a worker's transport, and a new transport after each pause, with the current rate limits."""

    def __init__(self, config: JoinConfig, identity: Identity) -> None:
        self._config, self._identity = config, identity
        self._upload_Bps = parse_rate(config.upload_limit) if config.upload_limit else None
        self._download_Bps = parse_rate(config.download_limit) if config.download_limit else None
        self.faults = Faults.parse(config.faults) if config.faults else None
        self._sockets: ZeroMQTransport | None = None

    def connect(self) -> tuple[FlowControlTransport, PeerAllowlist]:
        config, encrypted = self._config, self._config.unencrypted != "yes"
        allowlist = PeerAllowlist(bytes.fromhex(config.coordinator_key), relays=config.relay != "no")
        self._sockets = ZeroMQTransport(
            self._identity,
            SOFTWARE,
            gate=allowlist,
            encrypted=encrypted,
            plain_anywhere=not encrypted,  # the coordinator must also allow it
            upload_Bps=self._upload_Bps,
            download_Bps=self._download_Bps,
        )
        with_faults = partial(self.faults.over, name=config.name) if self.faults is not None else None
        transport = build_stack(
            self._sockets, self._identity, may_relay=allowlist.may_relay, with_faults=with_faults
        )
        return transport, allowlist

    def set_rate_limits(self, upload_Bps: float | None, download_Bps: float | None) -> None:
        self._upload_Bps, self._download_Bps = upload_Bps, download_Bps
        if self._sockets is not None:
            self._sockets.set_rate_limits(upload_Bps, download_Bps)
