"""Shows a volunteer what a bundle (script, packages, data) would run and send, and asks for consent.

Strings from the owner are printable (`gridtrain.tools.options.runfile` checks this), and are never
interpreted as markup.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from gridtrain.quantities import format_bytes, format_count, list_first
from gridtrain.tools.options import OptionValues

if TYPE_CHECKING:
    from gridtrain.training.data.shard_index import ShardIndex
    from gridtrain_worker.agent import Job
    from gridtrain_worker.bundle_consent import BundleOffer

MAX_ORIGINS, MAX_FILES = 5, 5
LABEL_WIDTH = 15
SHOWN_LIMITS = ("upload_limit", "download_limit", "donate_limit", "relay", "checkpoint_every", "set")
SHOWN_AS = {"donate_limit": "limit for sending the model", "set": "rules"}
DISCLOSED_DATA = (
    "to other workers: gradients or parameter changes, votes and your address; to newcomers also the model",
    "to the coordinator: this worker's name and address, step times, byte counts, the digests and sizes of "
    "model and data, and the values that the script reports",
    "never sent by gridtrain: your files, samples of your data, host or user names",
)


def ask_consent(settings: OptionValues, job: Job, offer: BundleOffer) -> bool:
    """Show the offer to the person at the terminal; return whether they accept it."""
    click.echo("\n".join(fit_lines(offer_lines(settings, job, offer))), err=True)
    click.echo("", err=True)
    return click.confirm("Run it on this machine?", default=False, err=True)


def show_offer(settings: OptionValues, job: Job, offer: BundleOffer | None) -> None:
    """Show the result of a dry run: text on a terminal, otherwise one JSON object.

    Args:
        offer: None if the command line, not a bundle, specifies the command.
    """
    from gridtrain_worker.bundle_consent import is_accepted

    if not sys.stdout.isatty():
        click.echo(json.dumps(offer_facts(settings, job, offer)))
        return
    if offer is None:
        click.echo(f"It would run: {shlex.join(job.command)}")
        click.echo("\n".join(fit_lines(_limits(settings, job))))
        return
    click.echo("\n".join(fit_lines(offer_lines(settings, job, offer))))
    state = "accepted on this machine" if is_accepted(offer) else "not accepted yet"
    click.echo(f"\nThis was a dry run: nothing was started.  The bundle is {state}.")


def offer_facts(settings: OptionValues, job: Job, offer: BundleOffer | None) -> dict[str, object]:
    """Return the offer as a JSON object."""
    from gridtrain_worker.bundle_consent import is_accepted

    limits = _shown_limits(settings, job, offer)
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
        "requires": run.requirements,
        "data": str(offer.data) if offer.data is not None else None,
        "data_set": _data_facts(offer),
        "name": job.name,
        "limits": limits,
    }


def _data_facts(offer: BundleOffer) -> dict[str, object] | None:
    data, index = offer.bundle.run.data, offer.index
    if data is None:
        return None
    if index is None:
        return {"file": data.file, "digest": data.digest, "url": data.url, "bytes": data.bytes or None}
    origins = dict(origins_of(index)[:MAX_ORIGINS])
    return {"files": len(index.shards), "bytes": index.bytes, "samples": index.samples, "origins": origins}


def offer_lines(settings: OptionValues, job: Job, offer: BundleOffer) -> list[str]:
    """Return the offer as lines of text."""
    run, entry = offer.bundle.run, offer.entry
    size = sum(len(content) for content in offer.bundle.files.values())
    files = list_first(sorted(offer.bundle.files), MAX_FILES)
    needs = ", ".join(f"{name} {least} or newer" if least else name for name, least in run.requires)
    has_changed = offer.previous_digest not in ("", offer.bundle.digest)
    changed = [f"  CHANGED      you accepted {offer.previous_digest} before"] if has_changed else []
    about = [f"  about        {run.about}"] if run.about else []
    image = [f"  image        {run.image} contains all of these"] if run.image else []
    return [
        f'The owner of the run "{entry.run}" asks this machine to run a script.',
        "",
        f"  by whom      the coordinator at {entry.coordinator}",
        f"               key {offer.coordinator_digest} (in your invitation; check it with the owner)",
        *about,
        f"  what         {shlex.join(('python', *offer.command[1:]))}",
        f"               {files}: {size:,} bytes; read them in {offer.folder}",
        f"  digest       {offer.bundle.digest}",
        *changed,
        f"  needs        {needs or 'nothing besides Python'}",
        *image,
        *_labelled("data", _data_lines(settings, offer)),
        f"  as           {job.name or 'a random name'}",
        *_labelled("sends", DISCLOSED_DATA),
        "  runs         with the permissions of your user account, without a sandbox",
        *_limits(settings, job, offer),
    ]


def fit_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines wrapped to the terminal's width, with the values aligned in one column."""
    columns = shutil.get_terminal_size().columns
    for line in lines:
        width = LABEL_WIDTH if line.startswith(" ") else 0
        pieces = textwrap.wrap(
            line[width:], max(20, columns - width), break_long_words=False, break_on_hyphens=False
        )
        for number, piece in enumerate(pieces or [""]):
            yield (" " * width if number else line[:width]) + piece


def _limits(settings: OptionValues, job: Job, offer: BundleOffer | None = None) -> list[str]:
    shown = [
        f"{SHOWN_AS.get(name) or name.replace('_', ' ')}: {text}"
        + (f" ({settings[name].where})" if settings[name].where and text == settings[name].shown else "")
        for name, text in _shown_limits(settings, job, offer).items()
    ]
    return _labelled("limits", shown)


def _shown_limits(settings: OptionValues, job: Job, offer: BundleOffer | None) -> dict[str, str]:
    """Return the limits as strings, by option name; with an offer, this machine's saved rules also apply."""
    from gridtrain.cli.worker_commands import NO_RULE
    from gridtrain_worker.saved_settings import SavedSettings
    from gridtrain_worker.training_policy import OFF, Rules

    shown = {name: settings[name].shown for name in SHOWN_LIMITS}
    if offer is not None:
        saved = SavedSettings(offer.entry.identity.with_suffix(""))
        rules = Rules().with_settings(saved.effective_rules(job.rules)).texts()
        for way in ("upload", "download"):
            shown[f"{way}_limit"] = rules.pop(way).replace(OFF, "none")
        shown["set"] = ", ".join(f"{key}={value}" for key, value in rules.items() if value not in NO_RULE)
        shown["set"] = shown["set"] or "none"
    return shown


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    return [f"  {label if i == 0 else '':<{LABEL_WIDTH - 3}} {text}" for i, text in enumerate(texts)]


def _data_lines(settings: OptionValues, offer: BundleOffer) -> list[str]:
    """Return lines that tell the volunteer the origin and the size of the data set; [] if there is none."""
    data = offer.bundle.run.data
    if data is None:
        return []
    where = [f"the owner says: {data.where}"] if data.where else []
    if offer.data is not None:
        return [f"{offer.data}, {data.digest}", *where]
    if offer.missing is not None and data.file:
        return [f"{data.file}, {data.digest}", *where]
    cache = f"kept in a cache of at most {settings['cache_limit'].shown}"
    if offer.index is None:
        return [
            f"{data.file}: {format_bytes(data.bytes)} will be fetched, and {cache}",
            f"from {data.url}, {data.digest}",
            *where,
        ]
    index, origins = offer.index, origins_of(offer.index)
    return [
        f"{format_count(len(index.shards), 'file')}, {format_bytes(index.bytes)}, "
        f"{format_count(index.samples, 'sample')}",
        f"files that this worker needs will be fetched, and {cache}",
        *(f"{count} from {origin}" for origin, count in origins[:MAX_ORIGINS]),
        *([f"and from {len(origins) - MAX_ORIGINS} other places"] if len(origins) > MAX_ORIGINS else []),
        *where,
    ]


def origins_of(index: ShardIndex) -> list[tuple[str, int]]:
    """Return the folders (URLs) that contain the data set's files, each with the number of its files.

    The folder with the most files comes first.
    """
    folders = (shard.url.rpartition("/")[0] for shard in index.shards)
    return Counter(folder or "the folder of --data-dir" for folder in folders).most_common()
