"""The version of gridtrain, which the wheel, the handshake and `--version` all read from this module."""

__version__ = "0.1.0"

SOFTWARE = f"gridtrain {__version__}"
"""What the handshake and the status call this software."""
