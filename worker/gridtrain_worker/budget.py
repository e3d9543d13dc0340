"""How many bytes were moved today, over restarts of everything: one small file.

Decides what counts as today, and what is believed of a file.  Never decides what follows: that is
`controls.Controls`.

    {"day": "2026-11-21", "bytes": 1234567}      replaced as a whole, and on the disk before `add` returns
"""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path

from gridtrain.errors import ConfigError

MAX_FILE_BYTES = 4096
FILE = "budget.json"


class Budget:
    """The file `FILE` in a worker's folder.  Raises `ConfigError` if it cannot be written or understood: a
    budget that nobody can keep must not look as if it were."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._day, self._bytes = self._read()

    def today_bytes(self, today: date) -> int:
        return self._bytes if self._day == today.isoformat() else 0

    def add(self, nbytes: int, today: date, *, sure: bool = True) -> None:
        """More was moved.  Bytes count when they are told of: some of yesterday's last ones count as today's,
        which is the careful side.  `sure`: it is on the disk when this returns."""
        total = self.today_bytes(today) + nbytes
        if (self._day, self._bytes) == (today.isoformat(), total):
            return
        self._day, self._bytes = today.isoformat(), total
        partial = self._path.with_suffix(".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump({"day": self._day, "bytes": self._bytes}, file)
                file.flush()
                if sure:
                    os.fsync(file.fileno())
            os.replace(partial, self._path)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written: {error.strerror}, so the day's bytes cannot be counted",
                remedy="make room, or check who may write there",
            ) from None

    def _read(self) -> tuple[str, int]:
        try:
            with open(self._path, "rb") as file:
                body = json.loads(file.read(MAX_FILE_BYTES))
            day, nbytes = str(date.fromisoformat(body["day"])), body["bytes"]
            if type(nbytes) is not int or nbytes < 0:
                raise ValueError(f"{nbytes!r} bytes")
            return day, nbytes
        except FileNotFoundError:
            return "", 0
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} does not say how many bytes were moved today: {error}",
                remedy="remove the file; the day then counts from nothing",
            ) from None
