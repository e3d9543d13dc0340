"""The `gridtrain` command: a client of the coordinator, with one file for each command.

Commands are imported when they are used, so that `gridtrain --help` is quick and a coordinator
needs no torch.  No other package imports this package.
"""

try:
    from gridtrain.cli.main import main
except KeyboardInterrupt:
    raise SystemExit(130) from None

__all__ = ["main"]
