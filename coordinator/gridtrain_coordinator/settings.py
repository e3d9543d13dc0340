"""From what a person has chosen, wherever that stands, to the daemon's settings.

Decides nothing: `gridtrain.tools.options` has the table.  Shared by `gridtrain coordinator` and
`python -m gridtrain_coordinator`.
"""

from __future__ import annotations

from pathlib import Path

from gridtrain.network.addresses import parse_explicit_address
from gridtrain.tools.bundle import Bundle
from gridtrain.tools.options import OptionValues as Chosen
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress, parse_address
from gridtrain_coordinator.serving import Settings


def settings_from(chosen: Chosen) -> Settings:
    """Raises `ConfigError`."""
    advertise, every_s = chosen.text("advertise"), chosen["backup_every"].value
    recut_s = chosen["recut_after"].value
    assert isinstance(every_s, int | float) and isinstance(recut_s, int | float)
    return Settings(
        run=chosen.text("run"),
        listen=parse_explicit_address(chosen.where("listen"), chosen.text("listen"), any_port=True),
        advertise=parse_explicit_address(chosen.where("advertise"), advertise) if advertise else "",
        state=_folder(chosen, "state"),
        unencrypted=chosen.switch("unencrypted"),
        benchmark=chosen.switch("benchmark"),
        min_workers=chosen.count("min_workers") or 1,
        exit_when_finished=chosen.switch("exit_when_finished"),
        backup_to=_folder(chosen, "backup_to"),
        backup_every_s=float(every_s),
        backup_keep=chosen.count("backup_keep") or 1,
        from_backup=_folder(chosen, "from_backup"),
        plans=chosen.text("order") == "planned",
        recut_s=float(recut_s),
        dashboard=_dashboard(chosen),
        bundle=Bundle.from_run_file(chosen.runfile) if chosen.switch("bundle") else None,
    )


def _dashboard(chosen: Chosen) -> DashboardAddress | None:
    text = chosen.text("dashboard")
    if text == chosen["dashboard"].option.off_word:
        return None
    return parse_address(
        text, open_to_network=chosen.switch("dashboard_open"), named=chosen.texts("dashboard_hosts")
    )


def _folder(chosen: Chosen, name: str) -> Path | None:
    text = chosen.text(name)
    return Path(text) if text else None
