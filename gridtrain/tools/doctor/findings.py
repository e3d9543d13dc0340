"""What a look at a machine has found: one line each, with its fix.

Decides nothing but how a finding is written down.  Never prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FindingLevel(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it can join; something will be slower, or is not known
    FAILURE = "failure"  # it cannot join like this


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at; stable, for programs.
        text: what was found, with the figures.
        fix: the next thing to do; empty where nothing is to be done.
        figures: numbers and short texts, for programs; units are in their names.
    """

    name: str
    level: FindingLevel
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For a JSON line."""
        return {
            "check": self.name,
            "level": str(self.level),
            "text": self.text,
            "fix": self.fix,
            **self.figures,
        }


def ok(name: str, text: str, **figures: Any) -> Finding:
    return Finding(name, FindingLevel.OK, text, "", figures)


def warning(name: str, text: str, fix: str, **figures: Any) -> Finding:
    return Finding(name, FindingLevel.WARNING, text, fix, figures)


def failure(name: str, text: str, fix: str, **figures: Any) -> Finding:
    return Finding(name, FindingLevel.FAILURE, text, fix, figures)


def worst_level(findings: Sequence[Finding]) -> FindingLevel:
    for level in (FindingLevel.FAILURE, FindingLevel.WARNING):
        if any(finding.level is level for finding in findings):
            return level
    return FindingLevel.OK
