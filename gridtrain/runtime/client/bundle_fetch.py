"""Fetching the run's bundle from the coordinator, block by block.

Decides when what came is what was announced, by size; what it holds is `gridtrain.tools.bundle`'s affair.  Keeps
nothing on a disk.
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
"""Answers to an earlier ask that was sent twice, over a connection that broke."""


@dataclass(frozen=True, slots=True)
class AnnouncedBundle:
    """What the status says of the bundle."""

    digest: str
    nbytes: int

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> AnnouncedBundle | None:
        """None: the run has no bundle.  Raises `RemoteProtocolError`: what is said cannot be."""
        said = status.get("bundle")
        if said is None:
            return None
        digest, nbytes = (said.get("digest"), said.get("bytes")) if isinstance(said, dict) else (None, None)
        if (
            not isinstance(digest, str)
            or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
            or type(nbytes) is not int
            or not 0 < nbytes <= MAX_BUNDLE_BYTES
        ):
            raise RemoteProtocolError(
                f"the coordinator announces a bundle that cannot be: {said!r:.200}",
                remedy="use the coordinator's own version of gridtrain",
            )
        return cls(digest, nbytes)


def fetch_bundle(client: CoordinatorClient, announced: AnnouncedBundle, timeout_s: float) -> bytes:
    """So many bytes as were announced; their digest is not checked here.

    Args:
        timeout_s: for each block.

    Raises:
        CoordinatorUnreachable: a block did not come in time.
        JoinRefused: there is no such bundle (any more).
        RemoteProtocolError: what came is not what was announced.
    """
    digest = bytes.fromhex(announced.digest.removeprefix("sha256:"))
    total = -(-announced.nbytes // MAX_BLOCK_BYTES)
    parts = [_fetch_block(client, digest, index, total, timeout_s) for index in range(total)]
    archive = b"".join(parts)
    if len(archive) != announced.nbytes:
        raise _bundle_changed_error(f"{len(archive)} bytes came, {announced.nbytes} were announced")
    return archive


def _fetch_block(client: CoordinatorClient, digest: bytes, index: int, total: int, timeout_s: float) -> bytes:
    for _ in range(MAX_UNEXPECTED_BLOCKS):
        reply = client.ask(BundleRequest(digest, index), timeout_s)
        if not isinstance(reply, BundleBlock):
            raise _bundle_changed_error(f"a {type(reply).__name__} came for block {index}")
        if (bytes(reply.digest), reply.total) != (digest, total):
            raise _bundle_changed_error(f"a block of another bundle came for block {index} of {total}")
        if reply.index == index:
            return bytes(reply.payload)
    raise _bundle_changed_error(f"other blocks came for block {index}, {MAX_UNEXPECTED_BLOCKS} times")


def _bundle_changed_error(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the bundle cannot be fetched: {reason}", remedy="start again; if it stays so, tell the run's owner"
    )
