"""Runs the `gridtrain` program for `python -m gridtrain.cli`."""

from gridtrain.cli.main import main

main()
