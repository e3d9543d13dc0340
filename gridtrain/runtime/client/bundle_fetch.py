"""Fetches the run's bundle from the coordinator, block by block, and checks its size.

What is in it is checked by `gridtrain.tools.bundle`.
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
"""Answers to an earlier request that was repeated after a connection broke."""


@dataclass(frozen=True, slots=True)
class AnnouncedBundle:
    """The bundle as the coordinator's status announces it."""

    digest: str
    nbytes: int

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> AnnouncedBundle | None:
        """None: the run has no bundle.  Raises `RemoteProtocolError` for an impossible announcement."""
        fields = status.get("bundle")
        if fields is None:
            return None
        digest, nbytes = (
            (fields.get("digest"), fields.get("bytes")) if isinstance(fields, dict) else (None, None)
        )
        if (
            not isinstance(digest, str)
            or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
            or type(nbytes) is not int
            or not 0 < nbytes <= MAX_BUNDLE_BYTES
        ):
            raise RemoteProtocolError(
                f"the coordinator announces an impossible bundle: {fields!r:.200}",
                remedy="use the coordinator's own version of gridtrain",
            )
        return cls(digest, nbytes)


def fetch_bundle(client: CoordinatorClient, announced: AnnouncedBundle, timeout_s: float) -> bytes:
    """The bundle, of the announced size; its digest is not checked here.

    Args:
        timeout_s: for each block.

    Raises:
        CoordinatorUnreachable: a block did not arrive in time.
        JoinRefused: there is no such bundle (any more).
        RemoteProtocolError: what arrived is not what was announced.
    """
    digest = bytes.fromhex(announced.digest.removeprefix("sha256:"))
    total = -(-announced.nbytes // MAX_BLOCK_BYTES)
    parts = [_fetch_block(client, digest, index, total, timeout_s) for index in range(total)]
    archive = b"".join(parts)
    if len(archive) != announced.nbytes:
        raise _bundle_changed_error(f"{len(archive)} bytes arrived, {announced.nbytes} were announced")
    return archive


def _fetch_block(client: CoordinatorClient, digest: bytes, index: int, total: int, timeout_s: float) -> bytes:
    for _ in range(MAX_UNEXPECTED_BLOCKS):
        reply = client.ask(BundleRequest(digest, index), timeout_s)
        if not isinstance(reply, BundleBlock):
            raise _bundle_changed_error(f"block {index} was answered with {type(reply).__name__}")
        if (bytes(reply.digest), reply.total) != (digest, total):
            raise _bundle_changed_error(
                f"block {index} of {total} was answered with a block of another bundle"
            )
        if reply.index == index:
            return bytes(reply.payload)
    raise _bundle_changed_error(f"block {index} was answered with other blocks {MAX_UNEXPECTED_BLOCKS} times")


def _bundle_changed_error(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the bundle cannot be fetched: {reason}",
        remedy="start again; if it fails again, tell the run's owner",
    )
