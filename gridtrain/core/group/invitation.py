"""What a volunteer gets from the run's owner: one line of text that opens the door.

Decides how an invitation looks and that one that was cut, mistyped or altered is refused in words.
Never decides whether it is (still) valid: that is `protocol.door`, at the coordinator.

    gridtrain1:  base64url, no padding, of
                 flags  coordinator's key  token    n  run      address   checksum
                 1      32                 32       1  n bytes  the rest  8 bytes

The token is a CURVE secret key, made by the run's owner: the volunteer connects with the key pair that
belongs to it, and the coordinator only ever knows a digest of its public half (`door.stored_form`).
The checksum finds accidents and has no secret in it: who can alter an invitation on its way has read it.
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
"""The most that is looked at, with all the line breaks and quotation marks that mail programs add."""

KEY_BYTES, CHECKSUM_BYTES = 32, 8
MAX_ADDRESS_BYTES = 128
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A run's name may become a folder's: it has no separator and is not `..`."""

_ADDRESS = re.compile(r"(tcp|memory)://[!-~]+")
_VERSION = re.compile(r"gridtrain(\d{1,9}):")
_ENCRYPTED = 1
_QUOTES = "'\"`<>\u2018\u2019\u201c\u201d\u00ab\u00bb"
_INVISIBLE = "\u200b\ufeff\u00ad"  # what some programs put between letters so that lines may break
_COPY_AGAIN = "copy the whole line again, from gridtrain1: to its end, or ask the run's owner for a new one"


@dataclass(frozen=True, slots=True)
class Invitation:
    """See the module's text.  Raises `ConfigError` if a field is out of bounds.

    Attributes:
        address: where the coordinator is dialled.
        coordinator: its public key; nobody else can answer there.
        token: the guest's secret key: `Identity.from_secret(token)`.  Never shown by `repr`.
        run: the run's name.
        encrypted: False: the coordinator was started with encryption switched off.
    """

    address: str
    coordinator: PeerId
    token: bytes = field(repr=False)
    run: str
    encrypted: bool = True

    def __post_init__(self) -> None:
        for key in (self.coordinator, self.token):
            if len(key) != KEY_BYTES:
                raise ConfigError(f"an invitation's keys have {KEY_BYTES} bytes, not {len(key)}")
        if not RUN_NAME.fullmatch(self.run):
            raise ConfigError(
                f"{self.run!r} cannot be a run's name",
                remedy="use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit",
            )
        if not _ADDRESS.fullmatch(self.address) or len(self.address) > MAX_ADDRESS_BYTES:
            raise ConfigError(
                f"{self.address[:MAX_ADDRESS_BYTES]!r} cannot be a coordinator's address",
                remedy=f"write tcp://host:port, at most {MAX_ADDRESS_BYTES} letters",
            )

    def text(self) -> str:
        """The line to give away, at most `MAX_TEXT` letters, none of which a shell treats specially."""
        run = self.run.encode()
        body = bytes([_ENCRYPTED if self.encrypted else 0]) + self.coordinator + self.token
        body += bytes([len(run)]) + run + self.address.encode()
        packed = base64.urlsafe_b64encode(body + checksum(body))
        return PREFIX + packed.decode().rstrip("=")


def looks_like(text: str) -> bool:
    """Somebody meant this for an invitation, of whatever version: not an address, say."""
    return _VERSION.match(_strip_decoration(text)) is not None


def parse(text: str) -> Invitation:
    """The invitation in `text`; white space anywhere in it and quotation marks around it do not matter.

    Raises:
        ConfigError: it is none, was changed on its way, or was made by a newer gridtrain.
    """
    line = _strip_decoration(text)
    version = _VERSION.match(line)
    if version is None:
        raise ConfigError(
            f"{line[:24]!r} is not an invitation, which begins with {PREFIX}",
            remedy="copy the whole line that the run's owner gave you"
            + ("" if line else "; if a command was to print it, see what that one said"),
        )
    if version[0] != PREFIX:
        newer = int(version[1]) > 1
        raise ConfigError(
            f"this invitation begins with {version[0]}, and this gridtrain reads {PREFIX}"
            + (": it was made by a newer gridtrain" if newer else ""),
            remedy="pip install --upgrade gridtrain, then try again" if newer else _COPY_AGAIN,
        )
    invitation = _unpack(line.removeprefix(PREFIX)) if len(line) <= MAX_TEXT_LENGTH else None
    if invitation is None:
        raise ConfigError("this invitation was cut short or changed on its way", remedy=_COPY_AGAIN)
    return invitation


def checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=CHECKSUM_BYTES, person=b"gridtrain invite").digest()


def is_intact(body: bytes, told: bytes) -> bool:
    """Nothing got lost or changed on the way (accidents; see the module's text)."""
    return checksum(body) == told


def _strip_decoration(text: str) -> str:
    kept = "".join(text[:MAX_PASTED_LENGTH].split())
    return "".join(letter for letter in kept if letter not in _INVISIBLE).strip(_QUOTES)


def _unpack(packed: str) -> Invitation | None:
    """None: it is damaged."""
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    if base64.urlsafe_b64encode(data).decode().rstrip("=") != packed:
        return None  # the spare bits of the last letter are not 0, or it has letters of another alphabet
    body, told = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    fixed = 1 + 2 * KEY_BYTES
    if not is_intact(body, told) or len(body) <= fixed:
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
    """What is kept of an invitation's public key."""
    return blake2b(key, digest_size=32, person=b"gridtrain door").hexdigest()
