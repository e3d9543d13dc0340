"""Converts the options of `gridtrain coordinator` and `python -m gridtrain_coordinator` into settings.

The table of options is in `gridtrain.tools.options`.
"""

from __future__ import annotations

from pathlib import Path

from gridtrain.network.addresses import check_reachable, parse_explicit_address
from gridtrain.tools.bundle import Bundle
from gridtrain.tools.options import OptionValues
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress, parse_address
from gridtrain_coordinator.serving import Settings


def settings_from(options: OptionValues) -> Settings:
    """Return the settings for these options.  Raises `ConfigError` if an option is invalid."""
    advertise = options.text("advertise")
    if advertise:
        advertise = parse_explicit_address(where := options.where("advertise"), advertise)
        check_reachable(where, advertise)
    return Settings(
        run=options.text("run"),
        listen=parse_explicit_address(options.where("listen"), options.text("listen"), any_port=True),
        advertise=advertise,
        state=_folder(options, "state"),
        unencrypted=options.switch("unencrypted"),
        benchmark=options.switch("benchmark"),
        min_workers=options.count("min_workers") or 1,
        exit_when_finished=options.switch("exit_when_finished"),
        backup_to=_folder(options, "backup_to"),
        backup_every_s=options.number("backup_every"),
        backup_keep=options.count("backup_keep") or 1,
        from_backup=_folder(options, "from_backup"),
        plans=options.text("order") == "planned",
        recut_s=options.number("recut_after"),
        dashboard=_dashboard(options),
        log_format=options.text("log_format"),
        bundle=Bundle.from_run_file(options.runfile) if options.switch("bundle") else None,
    )


def _dashboard(options: OptionValues) -> DashboardAddress | None:
    text = options.text("dashboard")
    if text == options["dashboard"].option.off_word:
        return None
    return parse_address(
        text, open_to_network=options.switch("dashboard_open"), allowed_hosts=options.texts("dashboard_hosts")
    )


def _folder(options: OptionValues, name: str) -> Path | None:
    text = options.text(name)
    return Path(text) if text else None
