"""The transport over TCP with ZeroMQ, encrypted with CURVE.  Its entry point is `zeromq_transport`.

- `sockets`: sockets with all limits set, and functions that read or write one message.
- `dialer`, `name_lookup`: outgoing connections.  `listener`, `half_open`: incoming connections.
- `handshake`: CURVE, access control and Hello.  `reachability`: checks whether a peer can be dialled.
- `tcp_options`, `congestion_control`: options of the TCP connections.
"""
