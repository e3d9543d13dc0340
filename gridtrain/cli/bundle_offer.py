"""Shows a volunteer what a bundle would run, and asks for consent.

Strings from the owner are printable (`gridtrain.tools.options.runfile` checks this), and are never
interpreted as markup.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

import click

from gridtrain.quantities import format_count
from gridtrain.tools.options import OptionValues

if TYPE_CHECKING:
    from gridtrain_worker.agent import Job
    from gridtrain_worker.bundle_consent import BundleOffer

SHOWN_LIMITS = ("upload_limit", "download_limit", "donate_limit", "relay", "checkpoint_every", "set")
DISCLOSED_DATA = (
    "to other workers: gradients or parameter changes, votes and your address; to newcomers also the model",
    "to the coordinator: this worker's name and address, step times, byte counts, the digests and sizes of",
    "  model and data, and the values that the script reports",
    "never sent by gridtrain: your files, samples of your data, host or user names",
    "the script itself runs with the permissions of your user account, without a sandbox",
)


def ask_consent(settings: OptionValues, job: Job, offer: BundleOffer) -> bool:
    """Show the offer to the person at the terminal; return whether they accept it."""
    click.echo("\n".join(offer_lines(settings, job, offer)), err=True)
    click.echo("", err=True)
    return click.confirm("Run it on this machine?", default=False, err=True)


def show_offer(settings: OptionValues, job: Job, offer: BundleOffer | None) -> None:
    """Show the result of a dry run."""
    from gridtrain_worker.bundle_consent import is_accepted

    if not sys.stdout.isatty():
        click.echo(json.dumps(offer_facts(settings, job, offer)))
        return
    if offer is None:
        click.echo(f"It would run: {shlex.join(job.command)}")
        click.echo("\n".join(_limits(settings)))
        return
    click.echo("\n".join(offer_lines(settings, job, offer)))
    state = "accepted on this machine" if is_accepted(offer) else "not accepted yet"
    click.echo(f"\nThis was a dry run: nothing was started.  The bundle is {state}.")


def offer_facts(settings: OptionValues, job: Job, offer: BundleOffer | None) -> dict[str, object]:
    """Return the offer as a JSON object."""
    from gridtrain_worker.bundle_consent import is_accepted

    limits = {name: settings[name].shown for name in SHOWN_LIMITS}
    if offer is None:
        return {"event": "dry_run", "command": list(job.command), "limits": limits}
    run = offer.bundle.run
    return {
        "event": "dry_run",
        "run": offer.entry.run,
        "coordinator": offer.entry.coordinator,
        "fingerprint": offer.coordinator_digest,
        "digest": offer.bundle.digest,
        "accepted": is_accepted(offer),
        "command": list(offer.command),
        "folder": str(offer.folder),
        "files": {name: len(content) for name, content in sorted(offer.bundle.files.items())},
        "requires": [f"{name}>={least}" if least else name for name, least in run.requires],
        "data": str(offer.data) if offer.data is not None else None,
        "name": job.name,
        "limits": limits,
    }


def offer_lines(settings: OptionValues, job: Job, offer: BundleOffer) -> list[str]:
    """Return the offer as lines of text."""
    run, entry = offer.bundle.run, offer.entry
    size = sum(len(content) for content in offer.bundle.files.values())
    files = format_count(len(offer.bundle.files), "file")
    needs = ", ".join(f"{name} {least} or newer" if least else name for name, least in run.requires)
    changed = (
        [f"  CHANGED      you accepted {offer.previous_digest} before"]
        if offer.previous_digest and offer.previous_digest != offer.bundle.digest
        else []
    )
    about = [f"  about        {run.about}"] if run.about else []
    data = [f"  data         {offer.data}, {run.data.digest}"] if offer.data and run.data else []
    image = [f"  image        {run.image} contains all of these"] if run.image else []
    return [
        f'The owner of the run "{entry.run}" asks this machine to run a script.',
        "",
        f"  by whom      the coordinator at {entry.coordinator}",
        f"               key {offer.coordinator_digest} (in your invitation; compare it with the owner)",
        *about,
        f"  what         {shlex.join(('python', *offer.command[1:]))}",
        f"               {files}, {size:,} bytes; read them in {offer.folder}",
        f"  digest       {offer.bundle.digest}",
        *changed,
        f"  needs        {needs or 'nothing besides Python'}",
        *image,
        *data,
        f"  as           {job.name or 'a random name'}",
        *(f"  {'sends' if i == 0 else '':<12} {text}" for i, text in enumerate(DISCLOSED_DATA)),
        *_limits(settings),
    ]


def _limits(settings: OptionValues) -> list[str]:
    shown = [
        f"{name.replace('_', ' ')}: {settings[name].shown}"
        + (f" ({settings[name].where})" if settings[name].where else "")
        for name in SHOWN_LIMITS
    ]
    return [f"  {'limits' if i == 0 else '':<12} {text}" for i, text in enumerate(shown)]
