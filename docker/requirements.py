"""What pyproject.toml wants for one of its extras, as lines for pip: `python requirements.py worker`.

For the Dockerfiles, which install dependencies before they copy our code.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def extra(name: str) -> list[str]:
    """With the extras that it names itself: worker = ["gridtrain[torch]", ...]."""
    found = []
    for line in PROJECT["optional-dependencies"][name]:
        own = re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", line)
        found += [part for other in own[1].split(",") for part in extra(other.strip())] if own else [line]
    return found


print(*PROJECT["dependencies"], *extra(sys.argv[1]), sep="\n")
