"""Transports messages between peers: connections, rate limits, relays, flow control and encryption.

The loops use `interface.Transport`, which `stack` builds in layers:

    FlowControlTransport      `flow_control`: byte credits bound a peer's memory use
    RelayTransport            `relay`: connections through a third peer (`relay_forwarder`), end-to-end
                              encrypted (`secure_channel`)
    ZeroMQTransport           direct connections over TCP (`zmq/`), or `in_memory` within one process

The layers inherit from `wrapping_transport`.  Both direct transports use `send_queue` (the order of
sending), `rate_limiter` (rate caps), `access_control` (which keys may connect) and `identity` (key pairs);
`receive_queue` applies the download cap over sockets, and `flood_detector` limits incoming messages.
`fault_injection` injects planned faults in tests.
"""
