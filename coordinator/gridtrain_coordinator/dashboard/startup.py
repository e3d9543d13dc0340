"""Opens the dashboard, or records why there is none, and formats the lines that tell the owner about it.

A missing package or an occupied port is an error only if the owner explicitly requested the dashboard.  The
web server is imported only if there is a dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gridtrain.errors import ConfigError, TransportError
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


@dataclass(frozen=True, slots=True)
class DashboardStartup:
    """A dashboard that is listening, or the reason why there is none."""

    service: DashboardService | None = None
    address: str = ""
    token: str = ""
    warning: str = ""
    failure: str = ""

    def start(self) -> None:
        if self.service is not None:
            self.service.start()

    def close(self) -> None:
        if self.service is not None:
            self.service.close()

    def startup_lines(self, *, is_terminal: bool) -> list[str]:
        """Return the lines to print for the owner; they contain the token only on a terminal."""
        if self.service is None:
            return [f"  no dashboard:        {self.failure}"] if self.failure else []
        key = f"#token={self.token}" if is_terminal else ""
        return [
            f"  in a browser:        {self.address}{key}",
            *([f"  {self.warning}"] if self.warning else []),
        ]


def open_dashboard(address: DashboardAddress | None, folder: Path, log: Log) -> DashboardStartup:
    """Bind the port and read the token, or record why this failed.  Does not start the service.

    Raises `ConfigError` or `TransportError` if the dashboard cannot be opened although the owner explicitly
    requested it.
    """
    if address is None:
        return DashboardStartup()
    try:
        return _open(address, folder, log)
    except (ConfigError, TransportError) as error:
        if address.is_required:
            raise
        return DashboardStartup(failure=f"{error.reason}; {error.remedy}")


def _open(address: DashboardAddress, folder: Path, log: Log) -> DashboardStartup:
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f"the dashboard needs packages that are not installed: {', '.join(missing)}", remedy=INSTALL
        )
    from gridtrain_coordinator.dashboard.dashboard_service import DashboardService

    token = load_token(folder)
    bound = bind(address)
    page = url(bound)
    warning = ""
    if not is_loopback(address.host):
        warning = (
            "OPEN TO THE NETWORK: anyone who reaches this port can see the run; the token is not encrypted"
        )
    service = DashboardService(bound, token, log, allowed_hosts=address.allowed_hosts)
    return DashboardStartup(service, page, token, warning)
