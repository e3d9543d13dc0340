"""Whether there is a dashboard, and what the coordinator says about it.

Decides that a missing package or a taken port stops only an owner who has asked for the dashboard by name.
Imports the web server only if there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gridtrain.errors import ConfigError
from gridtrain_coordinator.dashboard.listen_address import (
    INSTALL,
    DashboardAddress,
    bind,
    is_loopback,
    load_token,
    missing_packages,
    url,
)
from gridtrain_coordinator.run.events import Log

if TYPE_CHECKING:
    from gridtrain_coordinator.dashboard.dashboard_service import DashboardService


class DashboardStartup:
    """A dashboard that listens, or the reason why there is none."""

    def __init__(
        self, service: DashboardService | None, address: str, token: str, why_not: str, warning: str
    ) -> None:
        self.service = service
        self.address = address
        self._token = token
        self._failure = why_not
        self._warning = warning

    def start(self) -> None:
        if self.service is not None:
            self.service.start()

    def close(self) -> None:
        if self.service is not None:
            self.service.close()

    def startup_lines(self, *, is_terminal: bool) -> list[str]:
        """Lines for the owner; the token only where nobody else reads along."""
        if self.service is None:
            return [f"  no dashboard:        {self._failure}"] if self._failure else []
        key = f"#token={self._token}" if is_terminal else ""
        return [
            f"  in a browser:        {self.address}{key}",
            *([f"  {self._warning}"] if self._warning else []),
        ]


def open_dashboard(place: DashboardAddress | None, folder: Path, log: Log) -> DashboardStartup:
    """Bind the port and read the token, or say why not.  The service is not started yet.

    Raises `ConfigError` if `place` was asked for and cannot be had.
    """
    if place is None:
        return DashboardStartup(None, "", "", "", "")
    try:
        return _open(place, folder, log)
    except ConfigError as error:
        if place.is_required:
            raise
        return DashboardStartup(None, "", "", f"{error.reason}; {error.remedy}", "")


def _open(place: DashboardAddress, folder: Path, log: Log) -> DashboardStartup:
    absent = missing_packages()
    if absent:
        raise ConfigError(f"{', '.join(absent)} not installed", remedy=INSTALL)
    from gridtrain_coordinator.dashboard.dashboard_service import DashboardService

    token = load_token(folder)
    bound = bind(place)
    address = url(bound)
    warning = ""
    if not is_loopback(place.host):
        warning = (
            "OPEN TO THE NETWORK: whoever reaches this port sees the run, and the token travels in the clear"
        )
    service = DashboardService(bound, token, log, named=place.allowed_hosts)
    return DashboardStartup(service, address, token, "", warning)
