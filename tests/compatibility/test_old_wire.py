"""The bytes that members of a run exchange are those of commit 330f465, in both directions."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np
import pytest
import torch
from oldformats.files import described, recorded
from oldformats.library import (
    SKIP,
    CollectivePhase,
    Identity,
    IncomingActivations,
    OutgoingActivations,
    PayloadSlot,
    Provenance,
    RemoteProtocolError,
    SecureChannel,
    StateSnapshot,
    StepUpdate,
    StoreSlice,
    TensorTreeSpec,
    ValueKind,
    WirePrecision,
    capture_state,
    choose_residual,
    content_digest,
    decode_sparse,
    encode_sparse,
    hyperparameter_digest,
    hyperparameter_lines,
    initial_digest,
    is_skipped,
    optimizer_settings,
    pack_state,
    read_update,
    replica_digest,
    restore_state,
    sparse_digest,
    split_state,
    state_digest,
    write_update,
)
from oldformats.tiny_training import tiny_model, tiny_training, tree

# -- sparse payloads -------------------------------------------------------------------------------

SPARSE = [
    pytest.param(case, id=f"{case['kind'][0]}, {case['case']}") for case in recorded("wire/sparse.json")
]


def floats(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def test_kinds_of_values_have_their_numbers() -> None:
    known = {tuple(case["kind"]) for case in recorded("wire/sparse.json")}
    since_then = {("int4", 4), ("int2", 5)}
    assert known | since_then == {(kind.name.lower(), kind.value) for kind in ValueKind}


@pytest.mark.parametrize("case", SPARSE)
def test_an_old_sparse_payload_is_read(case: dict[str, Any]) -> None:
    payload, kind = bytes.fromhex(case["payload"]), ValueKind(case["kind"][1])
    found = decode_sparse(payload, n=case["n"], max_entries=len(case["indices"]), kind=kind)
    assert found.indices.tolist() == case["indices"]
    assert found.values.astype("<f4").tobytes().hex() == case["decoded"]


@pytest.mark.parametrize("case", SPARSE)
def test_a_sparse_payload_is_written_as_it_was(case: dict[str, Any]) -> None:
    made = encode_sparse(
        np.array(case["indices"], np.int64),
        floats(case["values"]),
        n=case["n"],
        kind=ValueKind(case["kind"][1]),
    )
    assert made.payload.hex() == case["payload"]
    assert made.sparse.values.astype("<f4").tobytes().hex() == case["decoded"]


# -- states, updates, residuals --------------------------------------------------------------------


def test_a_state_that_an_old_member_sends_is_taken_over() -> None:
    known = recorded("wire/states.json")
    blobs = [bytes.fromhex(known["own"]), bytes.fromhex(known["common"])]
    model, optimizer, trackers = tiny_training()
    expected, state = described(model.state_dict()), optimizer.state_dict()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    tracked = trackers["averages"].state
    trackers["averages"].state = {}
    restore_state(blobs, model, optimizer, trackers)
    assert described(model.state_dict()) == expected
    restored = optimizer.state_dict()
    assert restored["param_groups"] == state["param_groups"]
    assert all(
        torch.equal(restored["state"][number]["velocity"], each["velocity"])
        for number, each in state["state"].items()
    )
    found = trackers["averages"].state
    assert torch.equal(found.pop("tensor"), tracked.pop("tensor"))
    assert found == tracked and {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in tracked.items()
    }


def test_a_state_is_described_as_it_was() -> None:
    """safetensors may order its own bytes otherwise; lengths and JSON before them are ours."""
    known, (model, optimizer, trackers) = recorded("wire/states.json"), tiny_training()
    for text, blob in zip(
        (known["own"], known["common"]), capture_state(model, optimizer, trackers), strict=True
    ):
        old = bytes.fromhex(text)
        json_bytes = int.from_bytes(old[:8], "little")
        assert blob[:8] == old[:8] and blob[16 : 16 + json_bytes] == old[16 : 16 + json_bytes]


def test_digests_of_a_state_are_what_they_were() -> None:
    known, (model, optimizer, trackers) = recorded("wire/states.json"), tiny_training()
    own, common = bytes.fromhex(known["own"]), bytes.fromhex(known["common"])
    assert bytes(split_state([own, common])[0]).hex() == known["first block"]
    assert state_digest([own, common]).hex() == known["digest of blocks"]
    assert StateSnapshot.build(41, bytes(range(32)), own, common).table.hex() == known["image table"]
    assert content_digest(*pack_state(model, optimizer, trackers)).hex() == known["content digest"]
    assert initial_digest(model, optimizer, trackers).hex() == known["digest of the initial state"]
    assert replica_digest(model, optimizer).hex() == known["digest of replicas"]
    assert optimizer_settings(optimizer).decode() == known["settings"]
    assert hyperparameter_digest(optimizer).hex() == known["digest of settings"]
    assert hyperparameter_lines(optimizer) == known["lines of settings"]


def test_a_state_of_another_model_is_refused_with_what_to_do() -> None:
    known, (_, optimizer, trackers) = recorded("wire/states.json"), tiny_training()
    other = torch.nn.Sequential(tiny_model(), torch.nn.Linear(1, 1))
    blobs = [bytes.fromhex(known["own"]), bytes.fromhex(known["common"])]
    with pytest.raises(RemoteProtocolError) as refused:
        restore_state(blobs, other, optimizer, trackers)
    assert refused.value.remedy


def with_wide_flags(payload: bytes) -> bytes:
    """The payload of an update as protocol 3 writes it: flags of 8 bytes where one byte said `skip`."""
    end = 4 + int.from_bytes(payload[:4], "little")
    return payload[: end + 1] + bytes(7) + payload[end + 1 :]


def voted_digest(update: StepUpdate, flags: bytes) -> str:
    """The digest of a vote over `update`, with flags of this width."""
    salt = hashlib.blake2b(update.settings, digest_size=32).digest()
    parts = [] if update.update is None else [sparse_digest(update.update), *update.other_digests]
    return hashlib.blake2b(salt + flags + b"".join(parts), digest_size=32).hexdigest()


def test_what_a_step_did_is_as_it_was_but_for_the_width_of_its_flags() -> None:
    known = recorded("wire/steps.json")
    for step, name, skip in ((7, "update", 0), (8, "skipped", 1)):
        payload = with_wide_flags(bytes.fromhex(known[name]))
        update = read_update(step, payload, known["n"])
        assert write_update(update, known["n"]) == payload
        assert voted_digest(update, bytes([skip])) == known[f"digest of {name}"]
        assert update.digest.hex() == voted_digest(update, skip.to_bytes(8, "little"))
    skipped = read_update(8, with_wide_flags(bytes.fromhex(known["skipped"])), known["n"])
    assert (skipped.flags, skipped.update, skipped.other_digests) == (SKIP, None, (bytes(32),))
    step, settings, skip, indices, values, seals = known["fields of update"]
    update = read_update(7, with_wide_flags(bytes.fromhex(known["update"])), known["n"])
    assert update.update is not None
    assert [update.step, update.settings.hex(), is_skipped(update.flags)] == [step, settings, skip]
    assert update.update.indices.tolist() == indices and update.update.values.tolist() == values
    assert [seal.hex() for seal in update.other_digests] == seals


def test_a_residual_is_handed_over_as_it_was() -> None:
    known = recorded("wire/steps.json")
    residual = np.array(known["residual"], np.float32)
    chosen = choose_residual(residual, known["budget"], 2)
    assert chosen.payload.hex() == known["payload of residual"]
    assert (chosen.remainder_N.tolist() if chosen.remainder_N is not None else []) == known[
        "rest of residual"
    ]


# -- activations between stages --------------------------------------------------------------------

ACTIVATIONS = [pytest.param(case, id=case["wire"]) for case in recorded("wire/activations.json")]


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations_travel_as_they_did(case: dict[str, Any]) -> None:
    spec = TensorTreeSpec.of(tree(), 4, wire=WirePrecision(case["wire"]))
    buffers = [bytes(buffer) for buffer in spec.encode(tree(), 4)]
    assert str(spec) == case["text"]
    assert [buffer.hex() for buffer in buffers] == case["buffers"]
    outgoing = OutgoingActivations([memoryview(buffer) for buffer in buffers])
    assert bytes(outgoing.payload(PayloadSlot(CollectivePhase(9)))).hex() == case["joined"]


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_old_activations_are_read(case: dict[str, Any]) -> None:
    incoming = IncomingActivations(1 << 20)
    incoming.apply(StoreSlice(1, 0, bytes.fromhex(case["joined"]), Provenance(0, 1, 2, 0)))
    buffers = incoming.take_buffers()
    assert [bytes(buffer).hex() for buffer in buffers] == case["buffers"]
    found = TensorTreeSpec.of(tree(), 4, wire=WirePrecision(case["wire"])).decode(buffers, 4)
    sent = tree()
    assert torch.allclose(found["x"], sent["x"], atol=0.01)
    assert torch.equal(found["ids"], sent["ids"]) and torch.equal(found["pair"][0], sent["pair"][0])
    assert found["pair"][1] is None and (found["scale"], found["note"]) == (0.5, "text")


# -- sealed packets --------------------------------------------------------------------------------


class Drawn:
    """Numbered bytes in the place of random ones."""

    def __init__(self) -> None:
        self._bytes = bytes(i * i % 251 for i in range(4096))

    def __call__(self, count: int) -> bytes:
        drawn, self._bytes = self._bytes[:count], self._bytes[count:]
        return drawn


def test_a_sealed_conversation_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of sessions and lanes follow from the two peers' keys by digests that name their use."""
    known = recorded("wire/sealed.json")
    anna, bert = (Identity.from_secret(bytes.fromhex(secret)) for secret in known["secrets"])
    assert [anna.public.hex(), bert.public.hex()] == known["public"]
    monkeypatch.setattr(secrets, "token_bytes", Drawn())
    ours, theirs = (
        SecureChannel(anna, bert.public, b"anna greets"),
        SecureChannel(bert, anna.public, b"bert greets"),
    )
    call = ours.make_call()
    first = theirs.handle_offer(call)
    second = ours.handle_offer(first.packets[0])
    third = theirs.handle_offer(second.packets[0])
    packets = ((call,), first.packets, second.packets, third.packets)
    assert [[packet.hex() for packet in each] for each in packets] == known["packets"]
    assert (second.greeting, third.greeting) == (b"bert greets", b"anna greets")
    assert ours.session is not None and theirs.session is not None
    assert [p.hex() for p in ours.session.encrypt([b"control", b"payload"], bulk=False)] == known["control"]
    assert [p.hex() for p in theirs.session.encrypt([b"header", bytes(range(256))], bulk=True)] == known[
        "bulk"
    ]
    for packet in (*known["packets"][2][1:], *known["control"]):
        frames = theirs.decrypt(bytes.fromhex(packet))
    assert frames is not None and [bytes(frame) for frame in frames] == [b"control", b"payload"]
    for packet in (*known["packets"][3][1:], *known["bulk"]):
        frames = ours.decrypt(bytes.fromhex(packet))
    assert frames is not None and [bytes(frame) for frame in frames] == [b"header", bytes(range(256))]
