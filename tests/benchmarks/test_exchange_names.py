"""The names of exchanges on the command lines of the benchmarks."""

from __future__ import annotations

import pytest

from exchange_names import EXCHANGE_CLASSES, parse_exchange
from gridtrain.errors import ConfigError


@pytest.mark.parametrize("name", sorted(EXCHANGE_CLASSES))
def test_every_exchange_has_a_name(name: str) -> None:
    assert type(parse_exchange(name)).__name__.lower() == name


@pytest.mark.parametrize("text", ["gtopk:density=much", "gtopk:warmup=1", "gtopk:density"])
def test_options_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_exchange(text)
