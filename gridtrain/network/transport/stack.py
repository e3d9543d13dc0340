"""The transport as every loop uses it: direct connections, relays on top, credits on top of both.

    loop      done(peer, nbytes) for each bulk message that it has dealt with
      |       dial(peer, "tcp://..." | "relay:<key>")        everything else as `base.Transport` says
    CreditTransport      bulk waits for credit, end to end, over whatever the edge runs
      |
    RelayingTransport    sealed edges through a third peer; passing on for others, if `may_relay`
      |
    ZeroMQTransport | MemoryTransport                        direct connections, the gate, the caps

Credit is counted end to end, so a relay holds at most the windows of the edges through it.  Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from gridtrain.network.transport.flow_control import WINDOW_BYTES, FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import Transport
from gridtrain.network.transport.relay import RelayTransport
from gridtrain.network.transport.relay_forwarder import RelayPolicy, relay_for_nobody


def build_stack(
    inner: Transport,
    identity: Identity,
    *,
    may_relay: RelayPolicy = relay_for_nobody,
    software: str = "gridtrain",
    window_bytes: int = WINDOW_BYTES,
    with_faults: Callable[[Transport], Transport] | None = None,
) -> FlowControlTransport:
    """The whole stack over `inner`.

    Args:
        inner: whose key is `identity`'s.
        may_relay: asked for each message that `origin` wants to have passed on to `to`; called on the
            loop's thread.  A worker says yes to members of its generation, the coordinator to members of
            the run; guests are never among them.
        software: our name and version.
        window_bytes: for tests; the protocol fixes it.
        with_faults: puts planned faults under the credits (`injection.Faults.over`); None: there are none.
    """
    edges: Transport = RelayTransport(inner, identity, may_relay=may_relay, software=software)
    if with_faults is not None:
        edges = with_faults(edges)
    return FlowControlTransport(edges, window_bytes=window_bytes)
