"""A bundle's archive is determined by its files, and other archives are refused."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gridtrain.errors import RemoteProtocolError
from gridtrain.tools.bundle.bundle_archive import MAX_BUNDLE_BYTES, MAX_FILES, ArchiveError, pack, unpack

FILES = {"train.py": b"print('hello')\n", "run.toml": b"", "lib/model.py": bytes(range(256)) * 5}


def test_an_archive_is_reproducible_and_unpacked_as_it_was_packed() -> None:
    archive = pack(FILES)
    assert unpack(archive) == FILES
    assert pack(dict(reversed(FILES.items()))) == archive


def test_any_tar_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    path.write_bytes(pack(FILES))
    listed = subprocess.run(["tar", "tf", path], capture_output=True, text=True, check=True).stdout
    assert listed.split() == ["lib/model.py", "run.toml", "train.py"]
    with tarfile.open(path) as read:
        member = read.getmember("lib/model.py")
        assert (member.mode, member.uid, member.mtime, member.isfile()) == (0o644, 0, 0, True)
        content = read.extractfile(member)
        assert content is not None and content.read() == FILES["lib/model.py"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "0 files"),
        ({f"f{i}": b"" for i in range(MAX_FILES + 1)}, "129 files"),
        ({"../train.py": b""}, "not a plain relative file name"),
        ({"/etc/passwd": b""}, "not a plain relative file name"),
        ({"a/../../b": b""}, "not a plain relative file name"),
        ({".bashrc": b""}, "not a plain relative file name"),
        ({"a/.git/config": b""}, "not a plain relative file name"),
        ({"a//b": b""}, "not a plain relative file name"),
        ({"a\\b": b""}, "not a plain relative file name"),
        ({"a\nb": b""}, "not a plain relative file name"),
        ({"x" * 101: b""}, "not a plain relative file name"),
        ({"Train.py": b"", "train.py": b""}, "differ only in case"),
        ({"lib": b"", "lib/a": b""}, "both a file and a folder"),
        ({"big": bytes(MAX_BUNDLE_BYTES)}, "at most 8388608"),
    ],
    ids=lambda value: next(iter(value), "none")[:20] if isinstance(value, dict) else "",
)
def test_files_that_cannot_be_packed_are_refused(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        pack(files)


def made_by_tarfile(change: Callable[[tarfile.TarInfo], None], format: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive with one member, made by another program."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format) as archive:
        info = tarfile.TarInfo("train.py")
        info.size, info.mode = 3, 0o644
        change(info)
        archive.addfile(info, io.BytesIO(b"abc"[: info.size]))
    return raw.getvalue()


def link_to(kind: bytes, target: str) -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = kind, target, 0

    return change


def named(name: str) -> Callable[[tarfile.TarInfo], None]:
    return lambda info: setattr(info, "name", name)


HOSTILE = {
    "a way out": made_by_tarfile(named("../../.ssh/authorized_keys")),
    "an absolute name": made_by_tarfile(named("/tmp/x")),
    "a symbolic link": made_by_tarfile(link_to(tarfile.SYMTYPE, "/etc/passwd")),
    "a hard link": made_by_tarfile(link_to(tarfile.LNKTYPE, "../secret")),
    "a device": made_by_tarfile(link_to(tarfile.CHRTYPE, "")),
    "a folder": made_by_tarfile(link_to(tarfile.DIRTYPE, "")),
    "set-uid": made_by_tarfile(lambda info: setattr(info, "mode", 0o4755)),
    "a time": made_by_tarfile(lambda info: setattr(info, "mtime", 1)),
    "a long name by an extension": made_by_tarfile(named("d" * 150 + "/x"), tarfile.GNU_FORMAT),
    "an extended header": made_by_tarfile(named("d\u00e9"), tarfile.PAX_FORMAT),
    "nothing": b"",
    "only zeros": bytes(1024),
    "cut short": pack(FILES)[:-512],
    "cut in a file": pack(FILES)[:700],
    "trailing bytes": pack(FILES) + b"x",
    "trailing zeros": pack(FILES) + bytes(512),
    "something in a gap": pack({"a": b"x"}).replace(b"x" + bytes(10), b"x" + b"hidden" + bytes(4), 1),
    "twice the same name": pack({"a": b""})[:512] + pack({"a": b""}),
    "not in order": pack({"b": b""})[:512] + pack({"a": b""}),
    "a size that is no number": pack({"a": b"x"}).replace(b"00000000001\0", b"0000000000z\0", 1),
    "an enormous size": pack({"a": b"x"}).replace(b"00000000001\0", b"77777777777\0", 1),
    "a size in base 256": pack({"a": b"x"}).replace(b"00000000001\0", b"\x80" + bytes(10) + b"\x01", 1),
    "too large": bytes(MAX_BUNDLE_BYTES + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_of_another_program_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a bundle"):
        unpack(HOSTILE[name])


def test_every_changed_byte_is_found_unless_it_is_a_files_content() -> None:
    archive = pack({"a": b"xyz", "b": b""})
    for at in range(len(archive)):
        changed = bytearray(archive)
        changed[at] ^= 0x01
        try:
            files = unpack(bytes(changed))
        except RemoteProtocolError:
            continue
        assert pack(files) == bytes(changed), at
