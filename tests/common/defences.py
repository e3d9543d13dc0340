"""Switches that take one defence away, so that a test can show what it was for.

Decides nothing that the product decides: the product has no such switch.  A defence is a small named
function or constant of a module, which is looked up whenever it is needed; `without` puts something
in its place that lets everything through, and puts it back.

    with without("turn"):          gridtrain.core.collectives.collective._is_due = lambda event, due: True
        attack()                   now succeeds: a payload of the wrong rank is summed
                                   gridtrain.core.collectives.collective._is_due is again what it was

A test of an attack comes twice: defended, and with its switch.  The second shows that the first is not
green for another reason.
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
    """One place of the product that keeps one attack out.

    Attributes:
        attack: what succeeds without it.
        module, attribute: where it is; an attribute of a class is "Class.name".
        replacement: what takes its place.
    """

    name: str
    attack: str
    module: str
    attribute: str
    replacement: Any

    def resolve(self) -> tuple[Any, str]:
        """The object that holds the defence, and the attribute's own name.

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
    """Take these defences away inside of the block.  For one thread: modules are changed for all.

    Raises:
        ConfigError: a name is unknown, or its defence is away already.
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
        raise ConfigError(f"the defence {defence.name!r} is away already", remedy="do not nest the same name")
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
    """In place of a check that raises."""


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _nobody(*_: Any, **__: Any) -> list[Any]:
    return []


def _every_key(gate: Any, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str:
    return credentials[0].hex()


def _as_it_came(_: Any, value: Any) -> Any:
    return value


def _unbox_without_tag(box: bytes, nonce: bytes, key: bytes) -> bytes:
    """Decrypts whatever it is, as if there were no proof of who made it."""
    from nacl import bindings

    stream = bindings.crypto_secretbox_easy(bytes(len(box) - 16), nonce, key)[16:]
    return bytes(a ^ b for a, b in zip(box[16:], stream, strict=True))


_WIDE_OPEN = dict.fromkeys(
    ("max_str_len", "max_bin_len", "max_array_len", "max_map_len", "max_ext_len"), 2**31 - 1
)


# module: rows of name, attribute, what takes its place, and the attack that then succeeds
_TABLE: dict[str, list[tuple[str, str, Any, str]]] = {
    "gridtrain.network.wire.codec": [
        ("frame-count", "_check_count", _nothing, "frames that nobody measures ride along"),
        ("frame-size", "_check_sizes", _nothing, "a header or a payload of any size"),
        ("parse-limits", "_PARSE_LIMITS", _WIDE_OPEN, "long strings and maps are built, then refused"),
    ],
    "gridtrain.core.messages.declaration": [
        ("plain-text", "TextField._forbidden", re.compile("(?!)"), "a name that moves a terminal's cursor"),
        ("number-bounds", "IntField.pack", _as_it_came, "counts that are negative or no SQLite integer"),
        ("finite-figures", "FloatField.unpack", _as_it_came, "NaN in figures and averages"),
    ],
    "gridtrain.network.wire.schema": [
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
            "60 bytes, again and again, each answered with the model",
        ),
    ],
    "gridtrain.runtime.state_transfer.residual_pieces": [
        ("residual-size", "_check_total", _nothing, "a residual of more pieces than the model makes"),
        ("residual-values", "_check_values", _nothing, "values that keep the heir from ever sending again"),
    ],
    "gridtrain.core.member.residual_transfer": [
        ("heir", "_check_recipient", _nothing, "any member fills any other with residuals"),
    ],
    "gridtrain.runtime.state_transfer.catch_up_source": [
        (
            "update-asks",
            "exceeds_request_limit",
            _no,
            "a few bytes, again and again, each answered with all updates",
        ),
    ],
    "gridtrain.runtime.state_transfer.state_snapshot": [
        (
            "image-asks",
            "exceeds_request_limit",
            _no,
            "a few bytes, again and again, answered with a mebibyte",
        ),
        ("image-block", "matches_digest", _yes, "a donor puts its own numbers into a newcomer's model"),
    ],
    "gridtrain.runtime.state_transfer.update_log": [
        ("vote-digest", "matches_history", _yes, "a donor lets a newcomer replay what nobody voted for"),
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
        ("commit-proof", "_proves_commit", _yes, "one member makes another apply what nobody else applies"),
        ("generation-fence", "_is_foreign", _no, "messages of a generation that never comes are held"),
        ("stale-flood", "exceeds_stale_limit", _no, "old messages at line rate cost as much as new ones"),
        ("stale", "_is_over", _no, "messages of rounds that are over are held"),
        ("reach", "_check_not_ahead", _nothing, "messages of a step that never comes are held"),
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
    "gridtrain_coordinator.access.authorization_rules": [
        ("invite-expiry", "has_expired", _no, "an expired invitation lets in"),
        ("invite-uses", "is_used_up", _no, "a used invitation is replayed for a second key"),
        ("ban", "is_banned", _no, "a banned key comes in with an invitation"),
        ("kick", "predates_removal", _no, "a kicked key comes back with one kept in reserve"),
        ("operator-only", "is_operator", _yes, "a member bans another"),
        ("enrol-rate", "exceeds_enrolment_rate", _no, "one household uses up an invitation for many"),
        ("join-rate", "exceeds_join_rate", _no, "a key joins a thousand times a second"),
    ],
    "gridtrain_coordinator.access.violations": [
        ("three-strikes", "exceeds_limit", _no, "an offender stays for ever"),
        ("liar", "is_common_accuser", _no, "one member gets rid of all others by accusing them"),
    ],
    "gridtrain.network.transport.zmq.handshake": [
        ("zap", "authenticate", _every_key, "any key there is finishes the handshake"),
    ],
    "gridtrain.network.transport.access_control": [
        ("user-id", "is_key_match", _yes, "a member greets and speaks as another"),
        ("revocation", "is_still_admitted", _yes, "a removed member goes on sending"),
    ],
    "gridtrain.network.transport.zmq.sockets": [
        ("receive-queue", "RECEIVE_MESSAGES", 2, "a full queue, a ping and a reset end the process"),
    ],
    "gridtrain.network.transport.zmq.half_open": [
        ("half-open", "connections_to_close", _nobody, "silent connections keep descriptors"),
    ],
    "gridtrain.network.transport.zmq.dialer": [
        ("hoard", "exceeds_unread", _no, "a message that never ends fills the memory"),
    ],
    "gridtrain.network.transport.rate_limiter": [
        ("flood", "is_flood", _no, "a peer talks without end, and what it says is all kept"),
    ],
    "gridtrain.network.transport.secure_channel": [
        ("seal", "decrypt", _unbox_without_tag, "a relay alters what it passes on"),
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
