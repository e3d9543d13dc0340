"""`gridtrain doctor INVITATION`: checks whether this machine can join a run, and prints the findings.

The checks are in `gridtrain.tools.doctor`.  In a pipe, or with --json, the output is one JSON object per
line, {"check", "level", "text", "fix", ...}; the last object is
{"check": "doctor", "level": the worst level, "took_s": seconds}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.output import wrap_text
from gridtrain.errors import ConfigError

if TYPE_CHECKING:
    from gridtrain.core.group.invitation import Invitation
    from gridtrain.tools.doctor.examination import UploadLimit
    from gridtrain.tools.doctor.findings import Finding
    from gridtrain.tools.doctor.speedup_prediction import RunStatus

EXIT_WARNINGS, EXIT_FAILURES = 1, 2
MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failure": ("FAILURE", "red")}
EXIT_CODES = """\b
Exit codes:
  0    everything is fine
  1    this machine can join, with warnings
  2    this machine cannot join
  130  stopped by SIGINT (Ctrl-C)"""


@click.command(epilog=EXIT_CODES)
@click.argument("invitation")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line (the default in a pipe)."
)
def doctor(invitation: str, as_json: bool) -> None:
    """Check whether this machine can join the run of INVITATION.  Takes less than 20 seconds.

    The check does not join the run, and does not count as a use of the invitation.  It exchanges at most
    256 KiB in each direction with the coordinator, and with each of at most three members.  INVITATION may
    be @FILE or -, as for `gridtrain worker`.
    """
    from gridtrain.cli.worker import read_invitation
    from gridtrain.tools.doctor.examination import Examination
    from gridtrain.tools.doctor.findings import FindingLevel, worst_level

    began_s = time.monotonic()
    plain = as_json or not sys.stdout.isatty()
    found: list[Finding] = []
    invited = read_invitation(invitation)
    limit = _configured_upload_limit(invited)
    examination = Examination(invited, parse_run_status, upload_limit=limit)
    for finding in examination.findings():
        found.append(finding)
        _show(finding, plain)
    level, took_s = worst_level(found), time.monotonic() - began_s
    said, code = {
        FindingLevel.OK: ("this machine can join", 0),
        FindingLevel.WARNING: ("this machine can join; see the warnings", EXIT_WARNINGS),
        FindingLevel.FAILURE: ("this machine cannot join; see the failures", EXIT_FAILURES),
    }[level]
    if plain:
        click.echo(json.dumps({"check": "doctor", "level": str(level), "took_s": round(took_s, 3)}))
    else:
        click.echo(f"{said} ({took_s:.1f} s)")
    sys.exit(code)


def _configured_upload_limit(invitation: Invitation) -> UploadLimit | None:
    """Return the upload limit of the worker that `gridtrain worker` would start in this folder.

    Returns None if there is no limit.  The limit is the option's value, unless a rule that is saved for this
    worker overrides it.  The worker would use the run's first key on this machine that is not in use; keys
    that were admitted with this invitation come first.
    """
    from gridtrain.cli.option_flags import resolve_settings
    from gridtrain.network.transport.identity import claim_identity
    from gridtrain.network.transport.rate_limiter import parse_rate
    from gridtrain.runtime.client.invitation_store import InvitationStore
    from gridtrain.runtime.client.worker_defaults import identity_folder
    from gridtrain.tools.doctor.examination import UploadLimit
    from gridtrain_worker.saved_settings import SavedSettings

    chosen = resolve_settings("worker", {})
    text, where = chosen.text("upload_limit"), chosen.where("upload_limit")
    folder = identity_folder(invitation.run, invitation.coordinator)
    has_keys = any(folder.glob("worker-*.key"))  # otherwise nothing is written here
    own = InvitationStore(folder).keys_of(invitation)
    with claim_identity(folder, fresh=False, first=own) if has_keys else nullcontext() as free:
        if free is not None:
            rules = SavedSettings(free[1].with_suffix("")).later_rules({"upload": text} if text else {})
            if rule := rules.get("upload", ""):
                text, where = rule, "gridtrain worker set upload="
    return UploadLimit(parse_rate(text, where), where) if text not in ("", "off") else None


def _show(finding: Finding, plain: bool) -> None:
    if plain:
        click.echo(json.dumps(finding.document()))
        return
    mark, colour = MARKS[str(finding.level)]
    text = wrap_text(f"{mark:8} {finding.name:12} {finding.text}", indent=22)
    click.echo(click.style(text[:8], fg=colour) + text[8:])
    if finding.fix:
        click.echo(f"{'':22}-> {finding.fix}")  # on one line, because it may be a command to copy


def parse_run_status(picture: Mapping[str, Any]) -> RunStatus:
    """Read from a status the figures that the prediction needs.

    Raises `ConfigError` if no training worker has reported its share and its compute time, or if what the run
    exchanges is unknown.
    """
    from gridtrain.cli.live_network import facts_of, network_from_status
    from gridtrain.core.planning.exchange_facts import workload_of
    from gridtrain.tools.doctor.speedup_prediction import RunStatus, member_figures, member_shares

    load = workload_of(facts_of(picture))
    shares, compute_s = member_shares(picture), member_figures(picture, "computing_s")
    if load is None or not sum(shares) or not compute_s:
        raise ConfigError(
            "no worker is training yet, so there is nothing to compare with",
            remedy="try again when a worker is training",
        )
    whole = picture.get("global_batch_size")
    network = network_from_status(picture).members if len(shares) > 1 else None
    return RunStatus(
        network,
        load,
        compute_s,
        shares,
        whole if isinstance(whole, int) and whole > 0 else None,
        list(member_figures(picture, "float32_flops").values()),
    )
