"""Opens the dashboard, and tells the owner where it is.

A missing package or a taken port is an error only if the owner asked for the dashboard.  The web server is
imported only if there is a dashboard.
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
        self, service: DashboardService | None, address: str, token: str, failure: str, warning: str
    ) -> None:
        self.service = service
        self.address = address
        self._token = token
        self._failure = failure
        self._warning = warning

    def start(self) -> None:
        if self.service is not None:
            self.service.start()

    def close(self) -> None:
        if self.service is not None:
            self.service.close()

    def startup_lines(self, *, is_terminal: bool) -> list[str]:
        """Lines for the owner; the token is shown only on a terminal."""
        if self.service is None:
            return [f"  no dashboard:        {self._failure}"] if self._failure else []
        key = f"#token={self._token}" if is_terminal else ""
        return [
            f"  in a browser:        {self.address}{key}",
            *([f"  {self._warning}"] if self._warning else []),
        ]


def open_dashboard(address: DashboardAddress | None, folder: Path, log: Log) -> DashboardStartup:
    """Bind the port and read the token, or record why that fails.  The service is not started yet.

    Raises `ConfigError` if the owner asked for the dashboard and it cannot be used.
    """
    if address is None:
        return DashboardStartup(None, "", "", "", "")
    try:
        return _open(address, folder, log)
    except ConfigError as error:
        if address.is_required:
            raise
        return DashboardStartup(None, "", "", f"{error.reason}; {error.remedy}", "")


def _open(address: DashboardAddress, folder: Path, log: Log) -> DashboardStartup:
    missing = missing_packages()
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed", remedy=INSTALL)
    from gridtrain_coordinator.dashboard.dashboard_service import DashboardService

    token = load_token(folder)
    bound = bind(address)
    page = url(bound)
    warning = ""
    if not is_loopback(address.host):
        warning = (
            "OPEN TO THE NETWORK: anybody who reaches this port sees the run, and the token is not encrypted"
        )
    service = DashboardService(bound, token, log, allowed_hosts=address.allowed_hosts)
    return DashboardStartup(service, page, token, "", warning)
