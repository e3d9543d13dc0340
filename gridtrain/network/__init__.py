"""Bytes between peers.

    core -- Message --> transport/ -- codec --> frames --> TCP ==> frames -- codec --> Message --> core

- `wire` encodes messages as frames and checks every bound of what peers send; PROTOCOL.md is normative.
- `transport` carries messages between peers that are named by their public keys: one interface, over sockets
  or in memory, with relays and flow control on top.
- `addresses` parses the addresses that people write.
"""
