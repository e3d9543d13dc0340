"""Encodes messages as bytes and transports them between peers.

    core -- Message --> transport/ -- codec --> frames --> TCP ==> frames -- codec --> Message --> core

- `wire` encodes messages as frames, and checks that received messages are within all bounds; PROTOCOL.md is
  normative.
- `transport` sends messages to peers, which are named by their public keys, and receives messages from them.
  It has one interface, implemented over sockets and in memory, with relays and flow control on top.
- `addresses` parses addresses from configuration and the command line.
"""
