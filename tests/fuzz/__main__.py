"""`python tests/fuzz`, which is what `make fuzz` runs: see `gridfuzz.commands`."""

import sys

from gridfuzz.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
