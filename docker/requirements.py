"""Prints the requirements of an extra of pyproject.toml for pip: `python requirements.py worker`.

The Dockerfiles install dependencies before they copy the code.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def extra(name: str) -> list[str]:
    """Return the requirements of an extra; if it includes other extras ("gridtrain[torch]"), also theirs."""
    found = []
    for line in PROJECT["optional-dependencies"][name]:
        own = re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", line)
        found += [part for other in own[1].split(",") for part in extra(other.strip())] if own else [line]
    return found


print(*PROJECT["dependencies"], *extra(sys.argv[1]), sep="\n")
