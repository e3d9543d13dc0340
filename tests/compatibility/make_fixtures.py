"""Writes the files under data/ with the old code.  Not a test, and never adapted to newer code.

    git worktree add /tmp/old 330f465 && (cd /tmp/old && make setup)    a gridtrain of commit 330f465
    /tmp/old/.venv/bin/python make_fixtures.py --out NEW_FOLDER        all of it, about 4 minutes
    /tmp/old/.venv/bin/python make_fixtures.py --out FOLDER wire texts only these parts

Parts: wire, texts, checkpoints, runs (starts real processes on loopback), journals (reads what runs has
written).  Wire and texts are the same at every run.  The others are not: they have new keys, times and orders
of events.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMIT = "330f465"
PARTS = ("wire", "texts", "checkpoints", "runs", "journals")


def write(path: Path, value: Any) -> None:
    """As JSON, one line for each item of the first level: files stay small, and differences readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    lines = [
        (f"{json.dumps(key)}: " if isinstance(value, dict) else "") + json.dumps(item, separators=(",", ":"))
        for key, item in items
    ]
    first, last = "{}" if isinstance(value, dict) else "[]"
    path.write_text(first + "\n" + ",\n".join(lines) + "\n" + last + "\n", encoding="utf-8")


def refuse_other_code() -> None:
    """Raises `SystemExit` unless the gridtrain that is imported is of the recorded commit."""
    import gridtrain

    root = Path(gridtrain.__file__).parent.parent
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    if not found.stdout.startswith(COMMIT):
        sys.exit(f"the gridtrain in {root} is at commit {found.stdout.strip()[:7]}, not at {COMMIT}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder that data/ is, or becomes")
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    refuse_other_code()
    out: Path = options.out
    if out.resolve() != (HERE / "data").resolve():
        shutil.copytree(HERE / "data" / "scripts", out / "scripts", dirs_exist_ok=True)
    if "wire" in options.parts:
        from recording import wire

        write(out / "wire" / "messages.json", wire.messages())
        write(out / "wire" / "sparse.json", wire.sparse())
        write(out / "wire" / "states.json", wire.states())
        write(out / "wire" / "steps.json", wire.steps())
        write(out / "wire" / "activations.json", wire.activations())
        write(out / "wire" / "sealed.json", wire.sealed())
    if "texts" in options.parts:
        from recording import texts

        texts.record(out, write)
    if "checkpoints" in options.parts:
        from recording import checkpoints

        checkpoints.record(out, write)
    if "runs" in options.parts:
        from recording import runs

        runs.record(out, write)
    if "journals" in options.parts:
        from recording import journals

        journals.record(out, write)
    names = ("torch", "numpy", "safetensors", "msgpack", "pyzmq", "pynacl")
    made_with = {
        "commit": COMMIT,
        "python": sys.version.split()[0],
        **{name: version(name) for name in names},
    }
    write(out / "made_with.json", made_with)


if __name__ == "__main__":
    main()
