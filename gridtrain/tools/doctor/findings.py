"""The findings of `gridtrain doctor`: ok, or a warning or failure with a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FindingLevel(StrEnum):
    """The levels of findings, the worst one last."""

    OK = "ok"
    WARNING = "warning"  # the machine can join, but something will be slower or is unknown
    FAILURE = "failure"  # the machine cannot join


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        name: the name of the check; stable, for programs.
        text: the result, with its figures.
        fix: what to do next; "" if there is nothing to do.
        figures: numbers and short strings for programs; the names include the units.
    """

    name: str
    level: FindingLevel
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
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
    levels = {finding.level for finding in findings}
    return next((level for level in reversed(FindingLevel) if level in levels), FindingLevel.OK)
