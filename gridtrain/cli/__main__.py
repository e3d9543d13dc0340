"""`python -m gridtrain.cli`: the same as the program `gridtrain`."""

from gridtrain.cli.main import main

main()
