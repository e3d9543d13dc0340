"""Findings of `gridtrain doctor`: one line each, with what to do about it."""

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
    """One finding.

    Attributes:
        name: the check; stable, for programs.
        text: the result, with its figures.
        fix: what to do next; "": nothing.
        figures: numbers and short texts for programs; names contain the units.
    """

    name: str
    level: FindingLevel
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The finding as a JSON object."""
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
