"""Packs a bundle's files, within limits, into an archive (POSIX ustar) with the same bytes on every machine.

    header, 512 bytes: name, mode 0644, size, checksum     |  one for each file, sorted by name
    content, padded to a multiple of 512                   |
    1024 zero bytes

`unpack` repacks the files that it has read, and rejects the archive unless the bytes are equal.  An archive
therefore has no links, devices, extensions or gaps in which something could be hidden; modes, owners and
times are fixed.  This module does not access the disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from gridtrain.core.messages import MAX_BUNDLE_BYTES as MAX_BUNDLE_BYTES
from gridtrain.errors import RemoteProtocolError
from gridtrain.tools.options.runfile import is_safe_relative_name

MAX_FILES = 128
TAR_BLOCK_BYTES = 512
_END_OF_ARCHIVE = bytes(2 * TAR_BLOCK_BYTES)
_SIZE_FIELD = slice(124, 136)


class ArchiveError(ValueError):
    """The files cannot be packed into one archive."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of `files` (content by name).

    Raises `ArchiveError` if a name is not allowed, if two names differ only in case, if a name is also the
    folder of another file, or if there are no files, too many files or too many bytes.
    """
    if not 1 <= len(files) <= MAX_FILES:
        raise ArchiveError(f"there are {len(files)} files; there must be 1 to {MAX_FILES}")
    folded = {name.casefold(): name for name in files}
    if same := [(name, folded[name.casefold()]) for name in files if folded[name.casefold()] != name]:
        raise ArchiveError("{!r} and {!r} differ only in case".format(*same[0]))
    if inside := [name for name in files if any(other.startswith(name.casefold() + "/") for other in folded)]:
        raise ArchiveError(f"{inside[0]!r} is both a file and a folder")
    parts = []
    for name in sorted(files):
        if not is_safe_relative_name(name):
            raise ArchiveError(f"{name!r:.120} is not a plain relative file name")
        content = files[name]
        parts += [_header(name, len(content)), content, bytes(-len(content) % TAR_BLOCK_BYTES)]
    archive = b"".join([*parts, _END_OF_ARCHIVE])
    if len(archive) > MAX_BUNDLE_BYTES:
        raise ArchiveError(f"the archive is {len(archive)} bytes; at most {MAX_BUNDLE_BYTES} are allowed")
    return archive


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the content of each file in an archive, by name.  Raises `RemoteProtocolError` if `pack` cannot
    have made the archive."""
    if len(archive) > MAX_BUNDLE_BYTES:
        raise _no_bundle(f"it is {len(archive)} bytes; at most {MAX_BUNDLE_BYTES} are allowed")
    files: dict[str, bytes] = {}
    at = 0
    while len(files) <= MAX_FILES and (header := archive[at : at + TAR_BLOCK_BYTES]).strip(b"\0"):
        name, size = header[:100].rstrip(b"\0"), header[_SIZE_FIELD].rstrip(b"\0")
        if not name.isascii() or not size.isdigit() or set(size) - set(b"01234567"):
            raise _no_bundle(f"the header at byte {at} cannot be read")
        length = int(size, 8)
        files[name.decode("ascii")] = archive[at + TAR_BLOCK_BYTES : at + TAR_BLOCK_BYTES + length]
        at += TAR_BLOCK_BYTES + length + -length % TAR_BLOCK_BYTES
    try:
        again = pack(files)
    except ArchiveError as error:
        raise _no_bundle(str(error)) from None
    if again != archive:
        raise _no_bundle(
            "packing its files again gives other bytes, so it contains something else or is in another form"
        )
    return files


def _header(name: str, size: int) -> bytes:
    fields = (
        name.encode("ascii").ljust(100, b"\0")
        + b"0000644\0"  # mode
        + b"0000000\0" * 2  # owner, group
        + b"%011o\0" % size
        + b"00000000000\0"  # time
        + b" " * 8  # checksum, blank while it is being computed
        + b"0"  # a plain file
        + bytes(100)  # link target
        + b"ustar\x0000"
    ).ljust(TAR_BLOCK_BYTES, b"\0")
    return fields[:148] + b"%06o\0 " % sum(fields) + fields[156:]


def _no_bundle(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the received data is not a bundle: {reason}",
        remedy="inform the run's owner; nothing from this bundle was run or stored",
    )
