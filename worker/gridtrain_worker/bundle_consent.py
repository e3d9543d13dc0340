"""Fetches the bundle that a coordinator serves, and requires this machine's owner to accept it.

    status.bundle --fetch--> archive, stored for later --check digest and form--> Bundle
    Bundle --unpack into bundles/COORDINATOR/DIGEST/--> BundleOffer --ask the owner--> accepted.json
    accepted BundleOffer --> the command and the folder in which the agent runs it

A bundle is accepted if its digest was accepted earlier or is given in advance, or if the user accepts it now.
This module executes nothing, and writes files only below this machine's state folder for the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gridtrain.core.group.invitation import comparable_key
from gridtrain.errors import ConfigError, NotAccepted, RemoteProtocolError
from gridtrain.extras import require_packages
from gridtrain.network.transport.identity import make_private_folder
from gridtrain.runtime.client.bundle_fetch import AnnouncedBundle, fetch_bundle
from gridtrain.runtime.client.enrollment import Enrollment
from gridtrain.runtime.client.private_file import replace_private_file
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain.tools.bundle import MAX_BUNDLE_BYTES, Bundle
from gridtrain.tools.options.runfile import RunDescription
from gridtrain.training.data.shard_fetch import copy_rest
from gridtrain.training.data.shard_files import ShardCache, ShardFile
from gridtrain.training.data.shard_index import ShardIndex, read_index

ARCHIVE, ACCEPTED = "bundle.tar", "accepted.json"
MAX_CONSENTS = 1000


@dataclass(frozen=True, slots=True)
class BundleOffer:
    """A script that a volunteer is asked to run.

    Attributes:
        bundle: the script and its files.
        entry: the worker's admission to the run.
        folder: the folder with the bundle's files, for the user to read.
        previous_digest: the digest that was accepted last; empty if there is none.
        data: the data set's file, whose digest has been checked unless it is in the cache; None if the run
            names no such file, if it has yet to be fetched, or if something is missing.
        index: the index of the data set, whose files the script fetches; None if the run names none.
        missing: why the script cannot run on this machine: a package or the data set is missing.
    """

    bundle: Bundle
    entry: Enrollment
    folder: Path
    previous_digest: str
    data: Path | None
    index: ShardIndex | None = None
    missing: ConfigError | None = None

    @property
    def command(self) -> tuple[str, ...]:
        run = self.bundle.run
        return (sys.executable, run.script, *run.arguments)

    @property
    def coordinator_digest(self) -> str:
        """The first digits of the coordinator's key, in groups, for users to compare."""
        return comparable_key(self.entry.coordinator_key)


Ask = Callable[[BundleOffer], bool]
"""Shows the offer to the user; returns whether the user accepts it."""


def fetch_offer(entry: Enrollment, data_dir: str, timeout_s: float) -> BundleOffer:
    """Fetch and unpack the coordinator's bundle without executing any of it.

    Args:
        data_dir: the volunteer's folder in which to look for the data set's file; empty to look only among
            the bundle's files.

    Raises:
        ConfigError: the run has no bundle, the data set's index is invalid, or the files cannot be written.
        CoordinatorUnreachable: the bundle did not arrive in time.
        JoinRefused: the coordinator does not have the bundle, or no longer has it.
        RemoteProtocolError: the received bundle is invalid, or is not the announced one.
    """
    announced = AnnouncedBundle.from_status(entry.status)
    if announced is None:
        raise ConfigError(
            f'no training command was given, and the run "{entry.run}" has no bundle',
            remedy="write the command after two dashes: gridtrain worker INVITATION -- python train.py",
        )
    home = state_directory(entry.run) / "bundles" / entry.coordinator_key.hex()[:16]
    folder = home / announced.digest.removeprefix("sha256:")[:32]
    with _disk(home):
        make_private_folder(folder)
        bundle = _cached_archive(folder / ARCHIVE, announced) or _fetch_archive(entry, announced, timeout_s)
        _put(folder / ARCHIVE, bundle.archive)
        for name, content in bundle.files.items():
            _put(folder / "files" / name, content)
    accepted, run, files = _read_consents(home), bundle.run, folder / "files"
    data = missing = None
    try:
        require_packages(run.requires, "the run's script", run.image)
        data = find_data_file(run, Path(data_dir) if data_dir else files, files)
    except ConfigError as error:
        missing = error
    index = read_index(files / run.data_index) if run.data_index else None
    return BundleOffer(bundle, entry, files, next(reversed(accepted), ""), data, index, missing)


def require_consent(offer: BundleOffer, given: str, ask: Ask | None) -> None:
    """Check that exactly this bundle is accepted, and store its acceptance.

    Args:
        given: the digest accepted in advance; empty if there is none.
        ask: asks the user to accept the bundle; None if there is no user to ask.

    Raises:
        NotAccepted: the bundle is not accepted.
        ConfigError: the acceptance cannot be stored.
    """
    digest, home = offer.bundle.digest, offer.folder.parent.parent
    accepted = _read_consents(home)
    if given and _plain(given) != digest:
        raise NotAccepted(
            f"the run's bundle is {digest}, but --accept specifies {given}",
            remedy="inspect the new bundle with --dry-run, then pass its digest to --accept",
        )
    if digest not in accepted:
        if not given and ask is None:
            raise NotAccepted(
                f"the run's bundle {digest} has not been accepted on this machine",
                remedy=f"inspect it with --dry-run, then add --accept {digest}, or start the worker in a "
                "terminal",
            )
        if not given and ask is not None and not ask(offer):
            raise NotAccepted(
                "you did not accept the run's bundle, so none of it was run",
                remedy="start the worker again to accept it",
            )
    with _disk(home):
        latest = [*(known for known in accepted if known != digest), digest][-MAX_CONSENTS:]
        _put(home / ACCEPTED, json.dumps(latest).encode())


def is_accepted(offer: BundleOffer) -> bool:
    return offer.bundle.digest in _read_consents(offer.folder.parent.parent)


def _plain(digest: str) -> str:
    """Return the digest in lower case with the prefix "sha256:"."""
    text = digest.strip().lower()
    return text if text.startswith("sha256:") else f"sha256:{text}"


def _read_consents(home: Path) -> list[str]:
    """Return the accepted digests, latest last; none if the file cannot be read."""
    try:
        found = json.loads((home / ACCEPTED).read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return [digest for digest in found if isinstance(digest, str)] if isinstance(found, list) else []


# -- what the script needs ----------------------------------------------------------------------------


def find_data_file(run: RunDescription, data_dir: Path, files: Path) -> Path | None:
    """Find the data set's file and check its digest; return None if the run names no file, or if the file has
    yet to be fetched.  A fetched file is checked by `fetch_data_file` instead.

    Raises:
        ConfigError: the file is missing, or does not match the expected digest.
    """
    if run.data is None or not run.data.file:
        return None
    for path in (data_dir / run.data.file, files / run.data.file):
        if path.is_file():
            if run.data.url and _is_fetched(path, files):
                return path
            with path.open("rb") as file:
                found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            if found != run.data.digest:
                raise ConfigError(
                    f"{path} has the digest {found}, but the run's data set has {run.data.digest}",
                    remedy=f"download it again{': ' + run.data.where if run.data.where else ''}",
                )
            return path
    if run.data.url:
        return None
    raise ConfigError(
        f"the run's data set is missing: there is no file {data_dir / run.data.file}",
        remedy=(f"download it: {run.data.where}; then " if run.data.where else "")
        + "specify its folder with --data-dir",
    )


def _is_fetched(path: Path, files: Path) -> bool:
    """Return whether the path is a symbolic link in the bundle's folder; only `fetch_data_file` creates such
    links."""
    return path.is_symlink() and path.is_relative_to(files)


@contextlib.contextmanager
def fetch_data_file(
    offer: BundleOffer, cache: ShardCache, say: Callable[[str], None] | None = None
) -> Iterator[BundleOffer]:
    """Fetch the data set's file into the cache unless the volunteer has it; yield the offer with its path.

    Other runs cannot remove the file from the cache while the context is active.

    Args:
        say: see `copy_rest`.

    Raises:
        DataError: the file cannot be fetched, does not match the expected digest, or does not fit into the
            cache.
        ConfigError: a file cannot be written.
    """
    described = offer.bundle.run.data
    is_here = offer.data is not None and not _is_fetched(offer.data, offer.folder)
    if described is None or not described.url or is_here:
        yield offer
        return
    digest = described.digest.removeprefix("sha256:")
    shard = ShardFile(described.url, 0, described.bytes, digest)
    with contextlib.ExitStack() as stack:
        with _disk(cache.folder):
            copy = partial(copy_rest, say=say)
            stack.enter_context(cache.open(described.url, shard, as_stored=True, copy=copy))
            link = offer.folder / described.file
            make_private_folder(link.parent)
            partial_link = link.with_name(f".{link.name}.{secrets.token_hex(4)}")  # others may also do this
            partial_link.symlink_to((cache.folder / digest).absolute())
            partial_link.replace(link)
        yield replace(offer, data=link)


# -- files --------------------------------------------------------------------------------------------


def _cached_archive(path: Path, announced: AnnouncedBundle) -> Bundle | None:
    """Return the bundle that was fetched earlier if it is still the announced one, otherwise None."""
    with contextlib.suppress(OSError, RemoteProtocolError), path.open("rb") as file:
        return Bundle.from_archive(file.read(MAX_BUNDLE_BYTES + 1), announced.digest)
    return None


def _fetch_archive(entry: Enrollment, announced: AnnouncedBundle, timeout_s: float) -> Bundle:
    with entry.connect() as client:
        return Bundle.from_archive(fetch_bundle(client, announced, timeout_s), announced.digest)


def _put(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, unless it already has the given content."""
    if not path.is_symlink() and path.is_file() and path.read_bytes() == content:
        return
    make_private_folder(path.parent)
    replace_private_file(path, content)


@contextlib.contextmanager
def _disk(home: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's files cannot be written to {error.filename or home}: {error.strerror}",
            remedy="free space on that disk, or set XDG_STATE_HOME to another folder",
        ) from None
