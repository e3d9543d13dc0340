"""`make rivals`: installs rivals, each in its own environment, and lists their operations.

    python -m rivals setup [NAME...]

`python -m bench --cell "gloo/all_reduce P=4 n=25.6M rate=100Mbit"` measures an operation, `python -m accuracy
--contenders gloo` a training run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import record
from rivals.contract import NAMES, OPS
from rivals.environments import setup


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.parser(__doc__, out="")
    parser.add_argument("command", choices=("setup",))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no rival {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    reasons = setup(options.names or NAMES)
    for name, reason in reasons.items():
        print(f"{name}: {reason or 'ready'}")
        for op, meaning in OPS[name].items():
            print(f"    {op:20} {meaning}")
    return int(any(reasons.values()))


if __name__ == "__main__":
    sys.exit(main())
