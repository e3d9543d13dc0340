"""Runs the `gridtrain` program for `python -m gridtrain`."""

from importlib import import_module

import_module("gridtrain.cli").main()  # by name, because the library does not depend on its command line
