"""The version of gridtrain, which the wheel, the handshake and `--version` all read from this module."""

__version__ = "0.1.0"
