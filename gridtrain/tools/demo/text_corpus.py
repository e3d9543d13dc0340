"""The demo's data, with a held-out part: the source of Python's standard library, so nothing is downloaded.

    stdlib/*.py, sorted -> first 24 KiB of each -> every 10th file -> held out
                                                -> the others      -> training

Only top-level modules are read (no tests, no site-packages).
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from gridtrain.errors import ConfigError

FILE_LIMIT_BYTES = 24 * 1024
"""The maximum number of bytes read from a file, so that long modules do not dominate.

With this limit, Python 3.11 yields about 2 MB.
"""

TOTAL_LIMIT_BYTES = 4 * 1024 * 1024
MIN_BYTES = 512 * 1024
HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out text as bytes; no file is in both.

    Attributes:
        train: the beginnings of the training files, one after the other.
        held_out: the beginnings of the held-out files, one after the other.
        files: the number of files in both together.
    """

    train: bytes
    held_out: bytes
    files: int


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the corpus, which is the same on every call and in every process of a machine.

    Args:
        folder: the folder of the modules; by default the running interpreter's standard library.

    Raises:
        ConfigError: the sources are missing, as in a stripped or zipped standard library, or are smaller than
            `MIN_BYTES`.
    """
    if folder is None:
        folder = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total_bytes = 0
    names = sorted(path.name for path in folder.glob("*.py")) if folder.is_dir() else []
    for position, name in enumerate(names):
        piece = _read_start(folder / name)
        if total_bytes + len(piece) > TOTAL_LIMIT_BYTES:
            break
        total_bytes += len(piece)
        parts[position % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(piece)
    if total_bytes < MIN_BYTES:
        raise ConfigError(
            f"the standard library at {folder} has {total_bytes} bytes of Python source in {len(names)} "
            f"files; the demo needs at least {MIN_BYTES}",
            remedy="use a Python that is not stripped or zipped, from python.org, pyenv or your system",
        )
    return Corpus(b"".join(parts[0]), b"".join(parts[1]), len(parts[0]) + len(parts[1]))


def _read_start(path: Path) -> bytes:
    """Return the first `FILE_LIMIT_BYTES` of a file, cut at the end of a line."""
    with path.open("rb") as file:
        piece = file.read(FILE_LIMIT_BYTES)
    return piece[: piece.rfind(b"\n") + 1]
