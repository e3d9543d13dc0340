"""Names of the dashboard, whose packages are optional; to be adapted as `library`."""

from __future__ import annotations

from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.prometheus import exposition

PACKAGE = "gridtrain_coordinator.dashboard"
"""The folder of openapi.json."""

__all__ = ["PACKAGE", "Board", "exposition"]
