"""Writes an invitation as one line of text with a checksum, and parses such a line, detecting damage.

    gridtrain1:<these fields in base64url, without padding>

    flags    coordinator's key   token      n        run's name   address    checksum
    1 byte   32 bytes            32 bytes   1 byte   n bytes      the rest   8 bytes

The token is a CURVE secret key that the run's owner generates.  The volunteer connects with the token's key
pair, and the coordinator stores only a digest of the public key (`invitation_digest`).  The checksum detects
accidental changes; it is not keyed, because anyone who can alter an invitation in transit can also read it.
The coordinator decides whether an invitation is still valid (`gridtrain_coordinator.access`).
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from hashlib import blake2b

from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError

PREFIX = "gridtrain1:"
MAX_TEXT_LENGTH = 400
MAX_PASTED_LENGTH = 2000
"""Maximum number of characters that are parsed; any further characters are ignored.

The line breaks and quotation marks that mail programs add also count.
"""

KEY_BYTES, CHECKSUM_BYTES = 32, 8
MAX_ADDRESS_BYTES = 128
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Pattern of a run's name.  The name may become a folder name, so `..` and path separators are excluded."""

_ADDRESS = re.compile(r"(tcp|memory)://[!-~]+")
_VERSION = re.compile(r"gridtrain(\d{1,9}):")
_ENCRYPTED = 1
_QUOTES = "'\"`<>\u2018\u2019\u201c\u201d\u00ab\u00bb"
_INVISIBLE = "\u200b\ufeff\u00ad"  # inserted by some programs to allow line breaks
_COPY_AGAIN = "copy the whole line again, from gridtrain1: on, or ask the run's owner for a new invitation"


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation to a run; raises `ConfigError` if a field is not valid.

    Attributes:
        address: address of the coordinator.
        coordinator: public key of the coordinator.
        token: secret key of the invitation, for `Identity.from_secret(token)`; `repr` omits it.
        run: name of the run.
        encrypted: whether connections are encrypted; False if the coordinator was started without encryption.
    """

    address: str
    coordinator: PeerId
    token: bytes = field(repr=False)
    run: str
    encrypted: bool = True

    def __post_init__(self) -> None:
        for key in (self.coordinator, self.token):
            if len(key) != KEY_BYTES:
                raise ConfigError(
                    f"a key of the invitation is {len(key)} bytes long; it must be {KEY_BYTES} bytes long"
                )
        if not RUN_NAME.fullmatch(self.run):
            raise ConfigError(
                f"{self.run!r} is not a valid run name",
                remedy="use 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or a digit",
            )
        if not _ADDRESS.fullmatch(self.address) or len(self.address) > MAX_ADDRESS_BYTES:
            raise ConfigError(
                f"{self.address[:MAX_ADDRESS_BYTES]!r} is not a valid coordinator address",
                remedy=f"write tcp://host:port, with at most {MAX_ADDRESS_BYTES} characters",
            )

    def text(self) -> str:
        """Return the invitation as at most `MAX_TEXT_LENGTH` characters that need no quoting in any shell."""
        run = self.run.encode()
        body = bytes([_ENCRYPTED if self.encrypted else 0]) + self.coordinator + self.token
        body += bytes([len(run)]) + run + self.address.encode()
        packed = base64.urlsafe_b64encode(body + checksum(body))
        return PREFIX + packed.decode().rstrip("=")


def looks_like(text: str) -> bool:
    """Return whether the text looks like an invitation of any version rather than, say, an address."""
    return _VERSION.match(_strip_decoration(text)) is not None


def parse(text: str) -> Invitation:
    """Parse an invitation, ignoring white space anywhere in `text` and quotation marks around it.

    Raises:
        ConfigError: `text` is not an invitation, was altered, or has a version other than that of `PREFIX`.
    """
    line = _strip_decoration(text)
    version = _VERSION.match(line)
    if version is None:
        raise ConfigError(
            f"{line[:24]!r} is not an invitation; an invitation begins with {PREFIX}"
            if line
            else "no invitation was given",
            remedy="copy the whole line that the run's owner gave you"
            + ("" if line else "; if a command was meant to print the invitation, read what it printed"),
        )
    if version[0] != PREFIX:
        newer = int(version[1]) > 1
        raise ConfigError(
            f"this invitation begins with {version[0]}, but this gridtrain reads only {PREFIX}"
            + ("; it was made by a newer gridtrain" if newer else ""),
            remedy="run: pip install --upgrade gridtrain" if newer else _COPY_AGAIN,
        )
    invitation = _unpack(line.removeprefix(PREFIX)) if len(line) <= MAX_TEXT_LENGTH else None
    if invitation is None:
        raise ConfigError("this invitation was cut short or altered in transit", remedy=_COPY_AGAIN)
    return invitation


def checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=CHECKSUM_BYTES, person=b"gridtrain invite").digest()


def _strip_decoration(text: str) -> str:
    compact = "".join(text[:MAX_PASTED_LENGTH].split())
    return "".join(letter for letter in compact if letter not in _INVISIBLE).strip(_QUOTES)


def _unpack(packed: str) -> Invitation | None:
    """Decode the text after the prefix; return None if it is damaged."""
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    if base64.urlsafe_b64encode(data).decode().rstrip("=") != packed:
        return None  # unused bits of the last character are not 0, or a character is invalid
    body, expected = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    fixed = 1 + 2 * KEY_BYTES
    if checksum(body) != expected or len(body) <= fixed:
        return None
    run_end = fixed + 1 + body[fixed]
    try:
        return Invitation(
            address=body[run_end:].decode("ascii"),
            coordinator=body[1 : 1 + KEY_BYTES],
            token=body[1 + KEY_BYTES : fixed],
            run=body[fixed + 1 : run_end].decode("ascii"),
            encrypted=bool(body[0] & _ENCRYPTED),
        )
    except (UnicodeDecodeError, ConfigError):
        return None


def invitation_digest(key: PeerId) -> str:
    """Return the digest of an invitation's public key, which the coordinator stores instead of the key."""
    return blake2b(key, digest_size=32, person=b"gridtrain door").hexdigest()


def comparable_key(key: PeerId) -> str:
    """Return the first 32 hexadecimal digits of a key in groups of four, for people to compare."""
    digits = key.hex()[:32]
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))
