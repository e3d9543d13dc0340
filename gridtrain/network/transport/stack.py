"""The transport as every loop uses it: direct connections, relays on top, flow control on top of both.

    loop                      return_credit(held_bytes) after the events of a poll; else as `Transport`
      |                       dial(peer, "tcp://..." | "relay:<key>")
    FlowControlTransport      bulk waits for credit, end to end
      |
    RelayTransport            encrypted connections through a third peer; relaying for others, if `may_relay`
      |
    ZeroMQTransport | MemoryTransport      direct connections, access policy, rate caps

Credit is counted end to end, so a relay holds at most the windows of the connections through it.
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
        inner: has the key of `identity`.
        may_relay: asked on the loop's thread for each message that `origin` sends to `to` through us.  A
            worker relays between members of its generation, the coordinator between members of the run.
        software: our name and version.
        window_bytes: for tests; the protocol fixes it.
        with_faults: adds planned faults below flow control (`fault_injection.Faults.over`); None: none.
    """
    transport: Transport = RelayTransport(inner, identity, may_relay=may_relay, software=software)
    if with_faults is not None:
        transport = with_faults(transport)
    return FlowControlTransport(transport, window_bytes=window_bytes)
