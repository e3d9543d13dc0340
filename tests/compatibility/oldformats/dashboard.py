"""Names of the dashboard, whose packages are optional; to be adapted as `library`."""

from __future__ import annotations

from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.prometheus import exposition
from gridtrain_coordinator.status_report import mean_loss

PACKAGE = "gridtrain_coordinator.dashboard"
"""The folder of openapi.json."""

__all__ = ["PACKAGE", "Board", "exposition", "mean_loss"]
