"""Stores the rules and the pause that a worker's owner has set, for the next start.

    controls.json   {"upload": "5Mbit"}                                          gridtrain worker set
    word.json       {"paused": true, "until": null, "over": {"upload": "20Mbit"}}        worker pause, set

`over` holds the values from the command line that the owner's later settings replaced.  If the next start has
the same value on the command line, as when a service restarts, the later setting applies; otherwise, the
command line's value applies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gridtrain.errors import ConfigError
from gridtrain.runtime.client.private_file import replace_private_json
from gridtrain_worker.training_policy import Rules

RULES_FILE, OWNER_FILE = "controls.json", "word.json"
MAX_FILE_BYTES = 16_384
_UNWRITABLE = "free space on the disk, or check the folder's permissions"


class SavedSettings:
    """Reads and writes the two files in a worker's folder.

    The constructor and the methods raise `ConfigError` if a file cannot be read or written.

    Attributes:
        is_paused: whether the owner has paused this worker.
        until: when the pause ends, in local time; None if it has no end, or if there is no pause.
    """

    def __init__(self, folder: Path) -> None:
        self._rules_file, self._owner_file = folder / RULES_FILE, folder / OWNER_FILE
        self._rules = _texts(self._rules_file, _read(self._rules_file))
        try:
            Rules().with_settings(self._rules)
        except ConfigError as error:
            raise _unreadable(self._rules_file, error.reason) from None
        word = _read(self._owner_file)
        self._overridden = _texts(self._owner_file, word.get("over", {}))
        self.is_paused = word.get("paused") is True
        self.until = _time(self._owner_file, word.get("until")) if self.is_paused else None

    def effective_rules(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return all rules that apply, by key.

        Args:
            given: the rules from the command line of this start.
        """
        return dict(given) | self.later_rules(given)

    def later_rules(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the saved rules that apply in addition to, or instead of, those `given` at this start."""
        return {
            key: text
            for key, text in self._rules.items()
            if key not in given or self._overridden.get(key) == given[key]
        }

    def save_rules(self, settings: Mapping[str, str], given: Mapping[str, str]) -> None:
        """Save rules that the owner has just set.

        Args:
            settings: the new rules, by key; other saved rules are kept.
            given: the rules from the command line of this start.
        """
        self._rules |= settings
        over = {key: text for key, text in self._overridden.items() if key not in settings}
        self._overridden = over | {key: given[key] for key in settings if key in given}
        replace_private_json(self._rules_file, self._rules, _UNWRITABLE)
        self._write_owner_file()

    def pause(self, until: datetime | None) -> None:
        self.is_paused, self.until = True, until
        self._write_owner_file()

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused, self.until = False, None
            self._write_owner_file()

    def _write_owner_file(self) -> None:
        until = None if self.until is None else self.until.isoformat()
        body = {"paused": self.is_paused, "until": until, "over": self._overridden}
        replace_private_json(self._owner_file, body, _UNWRITABLE)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            body: Any = json.loads(file.read(MAX_FILE_BYTES))
        if not isinstance(body, dict):
            raise ValueError("it does not contain a JSON object")
        return body
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None


def _texts(path: Path, body: object) -> dict[str, str]:
    if not isinstance(body, dict):
        raise _unreadable(path, "it does not contain rules")
    return {str(key): str(value) for key, value in body.items()}


def _time(path: Path, text: object) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(str(text)).replace(tzinfo=None)
    except ValueError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, why: object) -> ConfigError:
    return ConfigError(
        f"the rules in {path} cannot be read: {why}", remedy="remove the file and set the rules again"
    )
