"""A coordinator that changes the exchange at each evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from gridtrain.core.planning.exchange_choice import ExchangeChoice


def choose_next_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each evaluation the coordinator chooses the next candidate."""

    def take_next(choice: ExchangeChoice, *measurements: Any, edges: bool) -> str:
        candidates = choice._candidates()
        choice.chosen = candidates[(candidates.index(choice.chosen) + 1) % len(candidates)]
        choice.reason = choice.chosen_text
        return choice.reason

    monkeypatch.setattr(ExchangeChoice, "reconsider", take_next)
