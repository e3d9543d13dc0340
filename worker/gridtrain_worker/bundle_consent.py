"""From the bundle that a coordinator serves to a command that this machine's owner has agreed to.

Decides whether there is agreement: a digest that was accepted before, or is given, or that a person accepts
now.  Runs nothing; writes only below this machine's state folder of the run.

    status.bundle --fetch--> archive --digest, form--> Bundle --> bundles/COORDINATOR/DIGEST/
                                 |                                    |
                           kept: not fetched again        Offer --ask--> accepted.json --> command, cwd
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gridtrain.errors import ConfigError, NotAccepted, RemoteProtocolError
from gridtrain.network.transport.identity import Identity, make_private_folder
from gridtrain.runtime.client.bundle_fetch import AnnouncedBundle, fetch_bundle
from gridtrain.runtime.client.coordinator_client import CoordinatorClient
from gridtrain.runtime.client.enrollment import Enrollment
from gridtrain.runtime.client.worker_naming import state_directory
from gridtrain.tools.bundle import MAX_BUNDLE_BYTES, Bundle
from gridtrain.tools.options.runfile import RunDescription

ARCHIVE, ACCEPTED = "bundle.tar", "accepted.json"
MAX_CONSENTS = 1000


@dataclass(frozen=True, slots=True)
class BundleOffer:
    """What a volunteer is asked to run.

    Attributes:
        folder: where its files lie already, for reading.
        before: the digest that was accepted last; "": none.
        data: the data set's file, found and checked; None: the run names none.
    """

    bundle: Bundle
    entry: Enrollment
    folder: Path
    previous_digest: str
    data: Path | None

    @property
    def command(self) -> tuple[str, ...]:
        run = self.bundle.run
        return (sys.executable, run.script, *run.arguments)

    @property
    def coordinator_digest(self) -> str:
        """Of the coordinator's key, for people to compare: eight groups of four digits."""
        digits = self.entry.coordinator_key.hex()[:32]
        return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))


Ask = Callable[[BundleOffer], bool]
"""Shows the offer to a person; True: they accept it."""


def fetch_offer(entry: Enrollment, data_dir: str, timeout_s: float) -> BundleOffer:
    """Fetch and unpack what the coordinator serves; nothing of it is run.

    Raises:
        ConfigError: the run has no bundle; what it needs is not here.
        CoordinatorUnreachable, JoinRefused, RemoteProtocolError: see `fetch` and `Bundle.opened`.
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
    accepted = _read_consents(home)
    check_packages(bundle.run)
    data = find_data_file(bundle.run, Path(data_dir) if data_dir else folder / "files", folder / "files")
    return BundleOffer(bundle, entry, folder / "files", next(reversed(accepted), ""), data)


def require_consent(offer: BundleOffer, given: str, ask: Ask | None) -> None:
    """Return once there is agreement to this very bundle, and remember it.

    Args:
        given: a digest that was accepted beforehand; "": none.
        ask: None: there is nobody to ask.

    Raises:
        NotAccepted: there is no agreement.
    """
    digest, home = offer.bundle.digest, offer.folder.parent.parent
    accepted = _read_consents(home)
    if given and _plain(given) != digest:
        raise NotAccepted(
            f"the run's bundle is {digest}, and what was accepted beforehand is {given}",
            remedy="look at the new one with --dry-run, then give its digest to --accept",
        )
    if digest not in accepted:
        if not given and ask is None:
            raise NotAccepted(
                f"nobody has accepted the run's bundle {digest} on this machine",
                remedy=f"look at it with --dry-run, then add --accept {digest}, or start this in a terminal",
            )
        if not given and ask is not None and not ask(offer):
            raise NotAccepted("you did not accept the run's bundle", remedy="nothing of it was run")
    with _disk(home):
        latest = [*(known for known in accepted if known != digest), digest][-MAX_CONSENTS:]
        _put(home / ACCEPTED, json.dumps(latest).encode())


def is_accepted(offer: BundleOffer) -> bool:
    return offer.bundle.digest in _read_consents(offer.folder.parent.parent)


def _plain(digest: str) -> str:
    """With or without its name in front."""
    text = digest.strip().lower()
    return text if text.startswith("sha256:") else f"sha256:{text}"


def _read_consents(home: Path) -> list[str]:
    """The latest last.  A file that cannot be read is an agreement that nobody has given."""
    try:
        found = json.loads((home / ACCEPTED).read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return [digest for digest in found if isinstance(digest, str)] if isinstance(found, list) else []


# -- what the script needs ----------------------------------------------------------------------------


def check_packages(run: RunDescription) -> None:
    """Raises `ConfigError` for packages that are not here, or too old."""
    missing = []
    for name, least in run.requires:
        try:
            found = version(name)
        except PackageNotFoundError:
            missing.append(f"{name}>={least}" if least else name)
            continue
        if least and _number(found) < _number(least):
            missing.append(f"{name}>={least}")
    if missing:
        image = f", or use the image {run.image}" if run.image else ""
        quoted = " ".join(f"'{name}'" for name in missing)
        raise ConfigError(
            f"the run's script needs {', '.join(missing)}, not installed here",
            remedy=f"{sys.executable} -m pip install {quoted}{image}",
        )


def _number(text: str) -> tuple[int, ...]:
    """The release: (2, 10, 0) of "2.10.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def find_data_file(run: RunDescription, data_dir: Path, files: Path) -> Path | None:
    """The data set's file, whose digest is right.  Raises `ConfigError`."""
    if run.data is None:
        return None
    for path in (data_dir / run.data.file, files / run.data.file):
        if path.is_file():
            with path.open("rb") as file:
                found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            if found != run.data.digest:
                raise ConfigError(
                    f"{path} has the digest {found}, and the run's data set has {run.data.digest}",
                    remedy=f"get it again{': ' + run.data.where if run.data.where else ''}",
                )
            return path
    raise ConfigError(
        f"the run's data set is not here: there is no {data_dir / run.data.file}",
        remedy=(f"get it: {run.data.where}; then " if run.data.where else "")
        + "name its folder with --data-dir",
    )


# -- files --------------------------------------------------------------------------------------------


def _cached_archive(path: Path, announced: AnnouncedBundle) -> Bundle | None:
    """What was fetched before, if it is still that."""
    with contextlib.suppress(OSError, RemoteProtocolError), path.open("rb") as file:
        return Bundle.from_archive(file.read(MAX_BUNDLE_BYTES + 1), announced.digest)
    return None


def _fetch_archive(entry: Enrollment, announced: AnnouncedBundle, timeout_s: float) -> Bundle:
    with CoordinatorClient(
        entry.coordinator, entry.coordinator_key, Identity.read(entry.identity), encrypted=entry.encrypted
    ) as client:
        return Bundle.from_archive(fetch_bundle(client, announced, timeout_s), announced.digest)


def _put(path: Path, content: bytes) -> None:
    """Make the file hold exactly that, for its owner alone; another worker may do the same just now."""
    if not path.is_symlink() and path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(home: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's bundle cannot be kept in {error.filename or home}: {error.strerror}",
            remedy="make room there, or set XDG_STATE_HOME to another folder",
        ) from None
