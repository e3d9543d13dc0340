"""Prints the product's files, one line each, with what it decides: `make files | grep -i "batch norm"`."""

from __future__ import annotations

import ast
import signal
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gridtrain", "coordinator/gridtrain_coordinator", "worker/gridtrain_worker")
COMMENTS = {".js": "//", ".sql": "--", ".toml": "#", ".yaml": "#"}


def described() -> Iterator[tuple[Path, str]]:
    """Each file, a package's own first, with the first line of its docstring or comment."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.*")):
        text = path.read_text(encoding="utf-8") if path.suffix in (".py", *COMMENTS) else ""
        if path.suffix == ".py":
            yield path.relative_to(ROOT), (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        elif path.suffix in COMMENTS and text.startswith(COMMENTS[path.suffix]):
            yield path.relative_to(ROOT), text.partition("\n")[0].removeprefix(COMMENTS[path.suffix]).strip()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may end first
    for path, line in described():
        name = path.parent.as_posix() + "/" if path.name == "__init__.py" else path.as_posix()
        print(f"{name}  {line}")
