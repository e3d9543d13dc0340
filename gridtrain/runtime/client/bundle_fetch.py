"""Downloads the run's bundle from the coordinator block by block and checks its size.

`gridtrain.tools.bundle` checks the bundle's content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gridtrain.core.messages import MAX_BLOCK_BYTES, MAX_BUNDLE_BYTES, BundleBlock, BundleRequest
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.client.coordinator_client import CoordinatorClient

MAX_UNEXPECTED_BLOCKS = 3
"""The download fails after this number of replies with a block that was not requested.  A few are allowed,
because an earlier request that was repeated after a connection broke may be answered twice."""


@dataclass(frozen=True, slots=True)
class AnnouncedBundle:
    """The digest and the size of the bundle, as announced in the coordinator's status."""

    digest: str
    nbytes: int

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> AnnouncedBundle | None:
        """Read the announcement from a status; return None if the run has no bundle.

        Raises `RemoteProtocolError` if the announcement is invalid.
        """
        match status.get("bundle"):
            case None:
                return None
            case {"digest": str(digest), "bytes": nbytes} if (
                re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
                and type(nbytes) is int
                and 0 < nbytes <= MAX_BUNDLE_BYTES
            ):
                return cls(digest, nbytes)
            case fields:
                raise RemoteProtocolError(
                    f"the coordinator announces an invalid bundle: {fields!r:.200}",
                    remedy="use the same version of gridtrain as the coordinator",
                )


def fetch_bundle(client: CoordinatorClient, announced: AnnouncedBundle, timeout_s: float) -> bytes:
    """Fetch the bundle and check its size.  The caller has to check its digest.

    Args:
        client: the connection to the coordinator.
        announced: the digest and the size of the bundle.
        timeout_s: the time limit for each block.

    Raises:
        CoordinatorUnreachable: a block did not arrive in time.
        JoinRefused: the coordinator does not have this bundle, or no longer has it.
        RemoteProtocolError: the received bundle does not match the announcement.
    """
    digest = bytes.fromhex(announced.digest.removeprefix("sha256:"))
    total = -(-announced.nbytes // MAX_BLOCK_BYTES)
    parts = [_fetch_block(client, digest, index, total, timeout_s) for index in range(total)]
    archive = b"".join(parts)
    if len(archive) != announced.nbytes:
        raise _bundle_changed_error(
            f"{len(archive)} bytes arrived, but {announced.nbytes} bytes were announced"
        )
    return archive


def _fetch_block(client: CoordinatorClient, digest: bytes, index: int, total: int, timeout_s: float) -> bytes:
    for _ in range(MAX_UNEXPECTED_BLOCKS):
        reply = client.ask(BundleRequest(digest, index), timeout_s)
        if not isinstance(reply, BundleBlock):
            raise _bundle_changed_error(
                f"the request for block {index} was answered with {type(reply).__name__}"
            )
        if (bytes(reply.digest), reply.total) != (digest, total):
            raise _bundle_changed_error(
                f"the request for block {index} of {total} was answered with a block of another bundle"
            )
        if reply.index == index:
            return bytes(reply.payload)
    raise _bundle_changed_error(
        f"the request for block {index} was answered with other blocks {MAX_UNEXPECTED_BLOCKS} times"
    )


def _bundle_changed_error(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the bundle cannot be fetched: {reason}",
        remedy="start the worker again; if the error persists, report it to the run's owner",
    )
