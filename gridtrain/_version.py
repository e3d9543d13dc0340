"""The version, in one place: the wheel, the handshake and `--version` all read it here."""

__version__ = "0.1.0"
