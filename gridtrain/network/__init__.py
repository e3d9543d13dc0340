"""Bytes between peers: `wire` encodes and bounds messages, `transport` carries them."""
