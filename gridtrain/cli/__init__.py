"""The `gridtrain` command: a client of the coordinator, with one file for each command.

Commands are imported when they are used, so that `gridtrain --help` is quick and a coordinator
needs no torch.  No other package imports this package.
"""

from gridtrain.cli.main import main

__all__ = ["main"]
