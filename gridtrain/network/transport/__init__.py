"""Carries messages between peers.  `interface.Transport` is what the loops use; `stack` builds it:

    FlowControlTransport      byte credits: bounds what a peer holds in memory
    RelayTransport            connections through a third peer, end-to-end encrypted (`secure_channel`)
    ZeroMQTransport           direct connections over TCP (`zmq/`), or `in_memory` within one process

Shared by the direct transports: `send_queue` (what leaves next), `rate_limiter` and `receive_queue` (rate
caps), `access_control` (who may connect), `identity` (key pairs).  `message_faults` and `fault_injection`
make planned faults happen in tests.
"""
