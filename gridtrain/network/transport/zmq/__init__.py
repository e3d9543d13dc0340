"""The transport over TCP with ZeroMQ, encrypted with CURVE; `zeromq_transport` is what others use."""
