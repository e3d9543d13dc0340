"""The transport over TCP with ZeroMQ, encrypted with CURVE: `zeromq_transport` is the facade of the others."""
