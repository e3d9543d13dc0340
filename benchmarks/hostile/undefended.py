"""Runs a module as `python -m` does; some functions by which it defends itself always return False.

python -m hostile.undefended MODULE.FUNCTION,MODULE.FUNCTION gridtrain coordinator --listen ...
"""

from __future__ import annotations

import runpy
import sys
from contextlib import ExitStack
from unittest import mock


def main() -> None:
    functions, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    with ExitStack() as stack:
        for function in functions.split(","):
            stack.enter_context(mock.patch(function, lambda *_: False))
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
