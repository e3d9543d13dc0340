"""Repeated records that are remembered equal those that are decoded."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire import codec

DATA = m.Data(m.RoundId(1, 2, 3, 0), m.Channel(), m.PayloadSlot(m.CollectivePhase.REDUCE), 0, b"abc")


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
