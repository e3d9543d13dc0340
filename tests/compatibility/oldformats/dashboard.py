"""What the tests use of the dashboard, whose packages are optional.  To be adapted as `library` is."""

from __future__ import annotations

from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.prometheus import exposition

PACKAGE = "gridtrain_coordinator.dashboard"
"""Where openapi.json lies."""

__all__ = ["PACKAGE", "Board", "exposition"]
