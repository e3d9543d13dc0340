"""Prints the repository's files, one line each, with what it decides: `make files | grep -i "batch norm"`."""

from __future__ import annotations

import ast
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gridtrain", "coordinator", "worker", "docker", "benchmarks", "examples", "tests")
COMMENTS = {".js": "//", ".sql": "--", ".toml": "#", ".yaml": "#", ".sh": "#", ".Dockerfile": "#"}


def described() -> Iterator[tuple[Path, str]]:
    """Each file with the first line of its docstring or comment; no tests, only what they use."""
    command = ["git", "ls-files", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for path in map(Path, listed.stdout.splitlines()):
        if path.name.startswith("test_") or "compatibility" in path.parts or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text(encoding="utf-8") if path.suffix in (".py", *COMMENTS) else ""
        if path.suffix == ".py":
            yield path, (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        elif path.suffix in COMMENTS:
            first = next((line for line in text.splitlines() if not line.startswith("#!")), "")
            if first.startswith(COMMENTS[path.suffix]):
                yield path, first.removeprefix(COMMENTS[path.suffix]).strip()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may end first
    for path, line in described():
        name = path.parent.as_posix() + "/" if path.name == "__init__.py" else path.as_posix()
        print(f"{name}  {line}")
