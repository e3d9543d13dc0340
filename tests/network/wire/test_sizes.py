"""Sizes that are computed without encoding, and repeated records that are remembered, equal the codec's."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack
import pytest

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire import codec

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 0x7FFFFFFF)
LARGE = (*EDGES, 0x80000000, 0xFFFFFFFF, 0x100000000, 2**63 - 1)
DATA = m.Data(m.RoundId(1, 2, 3, 0), m.Channel(), m.PayloadSlot(m.CollectivePhase.REDUCE), False, b"abc")


def drawn(rng: random.Random) -> m.Data:
    return m.Data(
        m.RoundId(*(rng.choice(LARGE) for _ in range(4))),
        m.Channel(*(rng.choice(EDGES) for _ in range(3))),
        m.PayloadSlot(rng.choice(list(m.CollectivePhase)), *(rng.choice(EDGES) for _ in range(3))),
        rng.random() < 0.5,
        rng.choice([b"", b"a", memoryview(bytes(1000)), bytes(70_000)]),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_size_of_data_is_what_encoding_it_gives(seed):
    rng = random.Random(seed)
    for message in (drawn(rng) for _ in range(300)):
        assert codec.data_bytes(message) == sum(map(len, codec.encode(message))), (seed, message)


def test_a_round_that_comes_again_is_read_as_itself_and_another_one_is_not():
    for step in (3, 3, 4, 3):
        message = replace(DATA, round=replace(DATA.round, step=step))
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("imposter", [True, 1.0, "1", None])
def test_what_only_looks_like_the_last_round_is_refused_as_ever(imposter):
    assert codec.decode(codec.encode(DATA)) == DATA
    code, (_, *rest), *others = msgpack.unpackb(codec.encode(DATA)[0], use_list=True)
    header = msgpack.packb([code, [imposter, *rest], *others])
    with pytest.raises(RemoteProtocolError):
        codec.decode([header, b"abc"])
