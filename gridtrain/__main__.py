"""Runs the `gridtrain` program for `python -m gridtrain`."""

from gridtrain.cli.main import main

main()
