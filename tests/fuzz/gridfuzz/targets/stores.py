"""Data that is read as a whole: the journal, blocks of a state from a source, the state itself.

journal      input is JSON, a list of [kind, body]
stateblocks  a schedule: blocks of an honest state, in any order, and other ones
state        input is the assembled state: u64, JSON, safetensors
"""

from __future__ import annotations

import json
import struct
from functools import cache
from random import Random

from gridfuzz.mutate import JSON
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridfuzz.targets.texts import change_json
from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.state_transfer.blobs import BlobReceiver, split_blocks
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain_coordinator.access import authorization
from gridtrain_coordinator.run.journal_recovery import generation_entry, recover_run

# -- journal ---------------------------------------------------------------------------------------


def run_journal(data: bytes) -> bool:
    try:
        entries = [(str(kind), body) for kind, body in json.loads(data)]
        json.dumps(entries, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False  # SQLite and the store would not return that
    if not all(isinstance(body, dict) for _, body in entries):
        return False
    try:
        authorization.Authorization(entries=entries).status(0.0)
        recovered = recover_run(entries)
    except (KeyError, TypeError, ValueError):
        return False
    if recovered.view is not None:
        again = json.loads(json.dumps(generation_entry(recovered.view, recovered.roster)))
        must(
            recover_run([("generation", again)]).view == recovered.view,
            "a MembershipView changes when it is written and read",
        )
    return True


def valid_journal(random: Random) -> bytes:
    a, b = b"a" * 32, b"b" * 32
    spec = {"size": 100, "seed": 0, "epochs": 1, "steps": None}
    entries: list[tuple[str, object]] = [("term", {"term": 1, "run": "r", "software": "s"})]
    entries.append(("run", {"facts": {"model": "m"}, "ledger": spec, "global_batch_size": None}))
    key, until_s = b"k".hex() * 32, random.choice((5.0, 1e12))
    entries.append(("invitation", {"key": key, "uses": 2, "until_s": until_s, "at_s": 1.0}))
    entries.append(("enrolled", {"peer": a.hex(), "invitation": random.choice((key, ""))}))
    entries.append(("strike", {"peer": a.hex(), "accuser": random.choice(("", b.hex())), "reason": "why"}))
    cause = random.choice(("order", "strikes", "liar"))
    entries.append(
        ("expelled", {"peer": b.hex(), "ban": random.random() < 0.5, "reason": "", "cause": cause})
    )
    entries.append(("pardoned", {"peer": b.hex()}))
    for generation in range(1, random.randrange(1, 4)):
        roster = (m.Member(a, "a", "tcp://1:1", 4, False), m.Member(b, "b", "", 4, True))
        spans = (m.Span(8, 12),)
        holders = random.choice((None, ((a, spans), (b, ()))))
        state = m.LedgerState(2, 12, (), 8 if holders else 12, 0, holders)
        decided = random.choice((None, m.RoundId(1, generation, 2, 0)))
        view = m.MembershipView(
            1, generation, 2, random.choice(list(m.Verdict)), decided, 1, bytes(32), state, "why"
        )
        entries.append(("generation", generation_entry(view, roster)))
        entries.append(("state", {"state": random.choice(("training", "waiting", "finished")), "reason": ""}))
    return json.dumps(entries).encode()


# -- blocks of a state -----------------------------------------------------------------------------


def run_stateblocks(data: bytes) -> bool:
    source, intake = Source(data), BlobReceiver()
    blobs = [source.bytes(source.byte() % 40) for _ in range(source.byte() % 4)]
    blocks = [bytes(block) for block in split_blocks(blobs)]
    accepted, honest = False, True
    for _ in range(64):
        if source.empty:
            break
        generation = 1 + source.one_in(8)
        if source.one_in(3):
            honest = False
            total = source.choice((len(blocks), 1, 2, 3, 65536, 65537, 2**31 - 1))
            index = source.choice((0, 1, total - 1))
            payload = source.choice(
                (b"", source.bytes(source.byte()), bytes(8), b"\xff" * 16, bytes(BLOCK_BYTES + 1))
            )
            block = m.StateBlock(1, generation, min(index, total - 1), total, payload)
        else:
            index = source.below(len(blocks))
            block = m.StateBlock(1, generation, index, len(blocks), memoryview(blocks[index]))
        try:
            intake.receive(block)
            if intake.is_complete_for(generation):
                term, of, received = intake.take_blobs()
                must((term, of) == (1, generation), "the state is of another generation")
                must(not honest or received == blobs, "the state has changed")
                accepted = True
        except RemoteProtocolError:
            continue
    return accepted


def valid_stateblocks(random: Random) -> bytes:
    return random.randbytes(random.choice((4, 30, 120, 400)))


# -- the state -------------------------------------------------------------------------------------


def run_state(data: bytes) -> bool:
    """A refused state leaves the worker unchanged; an accepted one can be sent on.

    It is not checked that the optimizer can step with it, because only a torch optimizer knows what it needs:
    a dishonest source can prevent the start of the joining worker, and of no other.
    """
    import torch

    from gridtrain.training.checkpoint import hyperparameters, serialization

    model, optimizer, scheduler = _built(seed=2)
    before = [t.clone() for t in model.state_dict().values()]
    try:
        serialization.restore_state(data, model, optimizer, {"schedule": scheduler})
    except RemoteProtocolError as error:
        if "cannot be loaded" not in error.reason:
            same = all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
            must(same, "a refused state changed the model")
        return False
    serialization.replica_digest(model, optimizer)
    hyperparameters.hyperparameter_digest(optimizer)
    serialization.capture_state(model, optimizer, {"schedule": scheduler})
    return True


def _built(seed: int):  # type: ignore[no-untyped-def]
    """A model with buffers, an optimizer with a state, a scheduler."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    if seed % 2:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


@cache
def _trained_state(seed: int) -> bytes:
    import torch

    from gridtrain.training.checkpoint import serialization

    model, optimizer, scheduler = _built(seed)
    model(torch.ones(4, 3) * torch.arange(4.0)[:, None]).sum().backward()
    optimizer.step()
    scheduler.step()
    return b"".join(serialization.capture_state(model, optimizer, {"schedule": scheduler}))


def valid_state(random: Random) -> bytes:
    return _trained_state(seed=random.choice((2, 2, 2, 4, 3)))


def change_state(data: bytes, random: Random) -> bytes:
    """Change a value in one of the two JSON documents, and correct the lengths."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        text, tail = data[8 : 8 + size], data[8 + size :]
        (head_size,) = struct.unpack_from("<Q", tail)
        head, numbers = tail[8 : 8 + head_size], tail[8 + head_size :]
    except struct.error:
        return data
    if random.random() < 0.75:
        text = change_json(text, random)
    else:
        head = change_json(head, random)
    return b"".join((struct.pack("<Q", len(text)), text, struct.pack("<Q", len(head)), head, numbers))


TARGETS = (
    Target(
        "journal",
        "the coordinator's journal",
        run_journal,
        valid_journal,
        (
            "gridtrain_coordinator.run.journal_recovery",
            "gridtrain_coordinator.access.authorization_limits",
        ),
        change_json,
        (*JSON, b'"verdict"', b'"holders"', b'"decided"', b'"COMMIT"'),
    ),
    Target(
        "stateblocks",
        "blocks of a source's state",
        run_stateblocks,
        valid_stateblocks,
        ("gridtrain.runtime.state_transfer.blobs",),
    ),
    Target(
        "state",
        "a source's state: JSON and safetensors, into model, optimizer and scheduler",
        run_state,
        valid_state,
        (
            "gridtrain.training.checkpoint.serialization",
            "gridtrain.training.checkpoint.nested_values",
            "gridtrain.training.checkpoint.hyperparameters",
        ),
        change_state,
        (*JSON, b'"tensor"', b'"dict"', b'"tuple"', b'"list"', b'"counter"', b'"F32"', b'"data_offsets"'),
        max_bytes=8192,
        cpu_s=1.0,
        memory_bytes=64 << 20,
    ),
)
