"""Runs a module as `python -m` does, without some of its defences, which `defences` names and removes.

python -m hostile.undefended half-open-time,half-open-room gridtrain.cli coordinator --listen ...
"""

from __future__ import annotations

import runpy
import sys

from defences import disable_defences


def main() -> None:
    names, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    with disable_defences(*names.split(",")):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
