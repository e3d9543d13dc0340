"""Switches that disable one defence, so that a test can show its effect.

The product has no such switch.  A defence is a small named function or constant of a module, which is looked
up at each use; `disable_defences` replaces it by one that allows everything, and restores it afterwards.

    with disable_defences("turn"): gridtrain.core.collectives.collective._is_due = lambda event, due: True
        attack()                   now succeeds: a payload of the wrong rank is summed
                                   gridtrain.core.collectives.collective._is_due is again what it was

A test of an attack runs twice: with all defences, and without one.  The second run shows that the first
does not pass for another reason.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from gridtrain.errors import ConfigError

_disabled: set[str] = set()


@dataclass(frozen=True, slots=True)
class Defence:
    """A function or constant of the product that prevents one attack.

    Attributes:
        attack: the attack that succeeds without it.
        module, attribute: its place; an attribute of a class is "Class.name".
        replacement: its replacement while disabled.
    """

    name: str
    attack: str
    module: str
    attribute: str
    replacement: Any

    def resolve(self) -> tuple[Any, str]:
        """The module or class of the defence, and the attribute's own name.

        Raises `AttributeError` or `ImportError` if the product has no such defence (any more).
        """
        holder: Any = importlib.import_module(self.module)
        *path, last = self.attribute.split(".")
        for part in path:
            holder = getattr(holder, part)
        getattr(holder, last)
        return holder, last


@contextmanager
def disable_defences(*names: str) -> Iterator[None]:
    """Disable these defences inside of the block, for all threads.

    Raises:
        ConfigError: a name is unknown, or its defence is already disabled.
    """
    for name in names:
        if name not in DEFENCES:
            raise ConfigError(
                f"there is no defence {name!r}", remedy=f"choose from: {', '.join(sorted(DEFENCES))}"
            )
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_disabled_defence(DEFENCES[name]))
        yield


@contextmanager
def _disabled_defence(defence: Defence) -> Iterator[None]:
    if defence.name in _disabled:
        raise ConfigError(
            f"the defence {defence.name!r} is disabled already", remedy="do not nest the same name"
        )
    holder, attribute = defence.resolve()
    own = vars(holder)
    inherited, original = (
        attribute not in own,
        own.get(attribute),
    )  # as stored: no binding, staticmethods whole
    _disabled.add(defence.name)
    setattr(holder, attribute, defence.replacement)
    try:
        yield
    finally:
        _disabled.discard(defence.name)
        if inherited:
            delattr(holder, attribute)
        else:
            setattr(holder, attribute, original)


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces a check that raises."""


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _none(*_: Any, **__: Any) -> list[Any]:
    return []


def _every_key(gate: Any, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str:
    return credentials[0].hex()


def _unchanged(_: Any, value: Any) -> Any:
    return value


def _unbox_without_tag(box: bytes, nonce: bytes, key: bytes) -> bytes:
    """Decrypts without authentication."""
    from nacl import bindings

    stream = bindings.crypto_secretbox_easy(bytes(len(box) - 16), nonce, key)[16:]
    return bytes(a ^ b for a, b in zip(box[16:], stream, strict=True))


_WIDE_OPEN = dict.fromkeys(
    ("max_str_len", "max_bin_len", "max_array_len", "max_map_len", "max_ext_len"), 2**31 - 1
)


# module: rows of name, attribute, replacement, and the attack that then succeeds
_TABLE: dict[str, list[tuple[str, str, Any, str]]] = {
    "gridtrain.network.wire.codec": [
        ("frame-count", "_check_count", _nothing, "frames of unchecked sizes are accepted"),
        ("frame-size", "_check_sizes", _nothing, "a header or a payload of any size"),
        ("parse-limits", "_PARSE_LIMITS", _WIDE_OPEN, "long strings and maps are built, then refused"),
    ],
    "gridtrain.core.messages.declaration": [
        ("plain-text", "TextField._forbidden", re.compile("(?!)"), "a name that moves a terminal's cursor"),
        ("number-bounds", "IntField.pack", _unchanged, "counts that are negative or no SQLite integer"),
        ("finite-figures", "FloatField.unpack", _unchanged, "NaN in figures and averages"),
    ],
    "gridtrain.network.wire.field_encoding": [
        (
            "record-rules",
            "RecordField._check_rule",
            _nothing,
            "a state of 2^31 blocks, a page beyond the last",
        ),
    ],
    "gridtrain.network.wire.sparse_payload": [
        ("sparse-kind", "_check_kind", _nothing, "values of another kind than the generation's"),
        ("sparse-count", "_check_entries", _nothing, "more entries than k"),
        ("sparse-length", "_check_length", _nothing, "bytes after the last value"),
    ],
    "gridtrain.network.wire.elias_fano": [
        ("sparse-padding", "_check_padding", _nothing, "bits after the last: one payload in two forms"),
        (
            "sparse-popcount",
            "_check_popcount",
            _nothing,
            "a unary part of other than K entries",
        ),
        ("sparse-order", "_check_order", _nothing, "indices twice, in disorder, or beyond the vector"),
    ],
    "gridtrain.network.wire.value_encoding": [
        ("sparse-finite", "_check_finite", _nothing, "NaN among fp32 and bf16 values"),
        ("sparse-scale", "_check_scale", _nothing, "NaN among fp16 values"),
        ("sparse-unscaled", "_check_unscaled", _nothing, "one payload of fp32 values in many forms"),
        ("sparse-blocks", "_check_blocks", _nothing, "int8 values that a scale makes infinite"),
    ],
    "gridtrain.network.wire.level_encoding": [
        ("sparse-levels", "_check_levels", _nothing, "int4 values that a scale makes infinite"),
        ("sparse-code-padding", "_check_padding", _nothing, "one payload of int2 values in many forms"),
    ],
    "gridtrain.runtime.buffers.collective_buffers": [
        ("dense-length", "_check_length", _nothing, "a slice of another length"),
        ("honest-values", "_check_magnitudes", _nothing, "NaN, infinity, or values that make a sum overflow"),
    ],
    "gridtrain.runtime.state_transfer.blobs": [
        ("state-size", "_check_state", _nothing, "a state larger than the model can have"),
        ("state-total", "_check_total", _nothing, "a state of more blocks than its table makes"),
        ("state-block", "_check_block", _nothing, "a block of another size than the table makes"),
        (
            "state-asks",
            "_exceeds_request_limit",
            _no,
            "60 bytes, repeated, each answered with the model",
        ),
    ],
    "gridtrain.runtime.state_transfer.residual_pieces": [
        ("residual-size", "_check_total", _nothing, "a residual of more pieces than the model makes"),
        (
            "residual-values",
            "_check_values",
            _nothing,
            "values that prevent the recipient from ever sending again",
        ),
    ],
    "gridtrain.core.member.residual_transfer": [
        ("heir", "_check_recipient", _nothing, "any member fills any other with residuals"),
    ],
    "gridtrain.runtime.state_transfer.catch_up_source": [
        (
            "update-asks",
            "exceeds_request_limit",
            _no,
            "a few bytes, repeated, each answered with all updates",
        ),
    ],
    "gridtrain.runtime.state_transfer.state_snapshot": [
        (
            "image-asks",
            "exceeds_request_limit",
            _no,
            "a few bytes, repeated, each answered with a mebibyte",
        ),
        (
            "image-block",
            "matches_digest",
            _yes,
            "a state source puts its own numbers into a newcomer's model",
        ),
    ],
    "gridtrain.runtime.state_transfer.update_log": [
        (
            "vote-digest",
            "matches_history",
            _yes,
            "a state source lets a newcomer replay updates without votes",
        ),
    ],
    "gridtrain.core.collectives.collective": [
        ("turn", "_is_expected", _yes, "a payload twice, or of a rank whose turn it is not"),
    ],
    "gridtrain.core.commit.two_phase_commit": [
        ("root-counts", "_counts_votes", _yes, "votes at a member that is not the root"),
        ("root-decides", "_decides", _yes, "a COMMIT that the root did not decide"),
        ("one-vote", "_is_same_vote", _yes, "a vote that is changed afterwards"),
    ],
    "gridtrain.core.commit.attempts": [
        (
            "commit-proof",
            "_proves_commit",
            _yes,
            "one member makes another apply an update that no other applies",
        ),
        ("generation-fence", "_is_foreign", _no, "messages of a generation that never begins are stored"),
        ("stale-flood", "exceeds_stale_limit", _no, "old messages at line rate cost as much as new ones"),
        ("stale", "_is_over", _no, "messages of rounds that are over are stored"),
        ("reach", "_check_not_ahead", _nothing, "messages of a step that never begins are stored"),
        ("held-room", "_check_early_limits", _nothing, "one member fills another's memory"),
    ],
    "gridtrain.core.member.scalar_means": [
        ("mean-role", "_check_role", _nothing, "an average that the root did not make"),
        ("mean-room", "MAX_OPEN_MEANS", 2**31, "numbers for steps that never come fill the root's memory"),
    ],
    "gridtrain.core.group.invitation": [
        ("invite-checksum", "is_intact", _yes, "a mistyped invitation leads to another address"),
    ],
    "gridtrain_coordinator.access.authorization": [
        ("invite-hashed", "invitation_digest", bytes.hex, "the journal names the invitations' keys"),
    ],
    "gridtrain_coordinator.access.authorization_limits": [
        ("invite-expiry", "has_expired", _no, "an expired invitation admits"),
        ("invite-uses", "is_used_up", _no, "a used invitation is replayed for a second key"),
        ("ban", "is_banned", _no, "a banned key joins with an invitation"),
        ("kick", "predates_removal", _no, "a kicked key rejoins with a reserved invitation"),
        ("operator-only", "is_operator", _yes, "a member bans another"),
        ("enrol-rate", "exceeds_enrolment_rate", _no, "one household uses up an invitation for many"),
        ("join-rate", "MAX_JOINS_PER_WORKER", 2**31, "a key joins a thousand times a second"),
    ],
    "gridtrain_coordinator.access.violations": [
        ("three-strikes", "exceeds_limit", _no, "an offender stays for ever"),
        ("liar", "is_common_accuser", _no, "one member removes all others by accusing them"),
    ],
    "gridtrain.network.transport.zmq.handshake": [
        ("zap", "authenticate", _every_key, "any key completes the handshake"),
    ],
    "gridtrain.network.transport.access_control": [
        ("user-id", "is_key_match", _yes, "a member impersonates another"),
        ("revocation", "is_still_admitted", _yes, "a removed member continues to send"),
    ],
    "gridtrain.network.transport.zmq.sockets": [
        ("receive-queue", "RECEIVE_MESSAGES", 2, "a full queue, a ping and a reset end the process"),
    ],
    "gridtrain.network.transport.zmq.half_open": [
        ("half-open", "connections_to_close", _none, "silent connections keep descriptors"),
    ],
    "gridtrain.network.transport.zmq.dialer": [
        ("hoard", "exceeds_unread", _no, "a message that never ends fills the memory"),
    ],
    "gridtrain.network.transport.rate_limiter": [
        ("flood", "is_flood", _no, "a peer sends without end, and all messages are stored"),
    ],
    "gridtrain.network.transport.secure_channel": [
        ("seal", "decrypt", _unbox_without_tag, "a relay alters forwarded messages"),
        ("replay", "is_replayed", _no, "a relay repeats a packet"),
    ],
    "gridtrain.network.transport.flow_control": [
        ("credits", "exceeds_credit", _no, "a sender fills the receiver's memory"),
    ],
}

DEFENCES: dict[str, Defence] = {
    name: Defence(name, attack, module, attribute, replacement)
    for module, rows in _TABLE.items()
    for name, attribute, replacement, attack in rows
}
