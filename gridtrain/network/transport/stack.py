"""Builds the loops' transport from direct connections, relays above them, and flow control on top.

    loop                      uses `Transport`; calls return_credit(held_bytes) after handling a poll's events
      |                       dial(peer, "tcp://..." | "relay:<key>")
    FlowControlTransport      bulk messages wait for credit, end to end
      |
    RelayTransport            encrypted connections through a third peer; relaying for peers, if `may_relay`
      |
    ZeroMQTransport | MemoryTransport      direct connections, access policy, rate caps

Credit is counted end to end, so the data that a relay holds are bounded by the windows of its connections.
"""

from __future__ import annotations

from collections.abc import Callable

from gridtrain.network.transport.flow_control import FlowControlTransport
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
    with_faults: Callable[[Transport], Transport] | None = None,
) -> FlowControlTransport:
    """Build the whole stack over `inner`.

    Args:
        inner: the transport with direct connections; it must use the key of `identity`.
        identity: our key pair.
        may_relay: returns whether `origin` may send to `to` through us; the loop's thread calls it for each
            message.  A worker relays between the members of its generation, and the coordinator relays
            between the members of the run.
        software: the name and version of our software.
        with_faults: adds planned faults below flow control (`fault_injection.Faults.over`); None for no
            faults.
    """
    transport: Transport = RelayTransport(inner, identity, may_relay=may_relay, software=software)
    if with_faults is not None:
        transport = with_faults(transport)
    return FlowControlTransport(transport)
