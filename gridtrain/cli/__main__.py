"""Runs the program `gridtrain` for `python -m gridtrain.cli`."""

from gridtrain.cli.main import main

main()
