"""The text of cells, and bounds with numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from bench.bounds import bound_s, butterfly_rounds, payload_bytes
from bench.cells import Cell, CellError, Link, parse
from bench.measurement import by_link
from bench.suites import SUITES, cells_of
from gridtrain.config import Dense, GTopK
from gridtrain.errors import ConfigError


def test_a_cell_is_parsed() -> None:
    cell = parse("gtopk:values=fp32 P=4 n=25.6M rate=100Mbit delay=20ms density=0.002 curve")

    assert cell.link == Link(4, "100Mbit", 0.02)
    assert (cell.n, cell.k, cell.encrypted) == (25_600_000, 51_200, True)
    assert cell.exchange == GTopK(density=0.002, values="fp32")
    assert cell.exchange_text == "gtopk:values=fp32,density=0.002"
    assert str(cell.link) == "P = 4, 100Mbit, 20 ms"


def test_a_density_in_the_exchange_has_precedence() -> None:
    cell = parse("gtopk:density=0.5 P=2 n=10")
    assert cell.exchange == GTopK(density=0.5)
    assert cell.exchange_text == "gtopk:density=0.5"


def test_a_dense_exchange_has_no_density() -> None:
    assert parse("dense P=2 n=1k density=0.5").exchange == Dense()
    assert parse("dense P=2 n=1k density=0.5").exchange_text == "dense"


def test_a_rival_is_parsed() -> None:
    cell = parse("gloo/all_gather P=8 n=2.56M rate=1Gbit")
    assert (cell.rival, cell.op, cell.dense) == ("gloo", "all_gather", False)
    assert parse("mpi/all_reduce P=8 n=1M").dense


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("dense n=1M", "P= and n= are needed"),
        ("dense P=1 n=1M", "at least 2"),
        ("dense P=4 n=0", "not a number of elements"),
        ("dense P=4 n=1M P=8", "given twice"),
        ("dense P=4 n=1M speed=3", "are possible"),
        ("dense P=4 n=1M rate=fast", "not a rate"),
        ("dense P=4 n=1M delay=20", "not a time"),
        ("gtopk P=4 n=1M density=2", "from 1e-09 to 1"),
        ("gloo/all_reduce P=4 n=1M curve", "plain mode"),
    ],
)
def test_an_invalid_cell_is_refused_with_a_reason(text: str, error: str) -> None:
    with pytest.raises(CellError, match=error):
        parse(text)


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no exchange 'morse'"):
        parse("morse P=4 n=1M")
    with pytest.raises(ConfigError, match="'colour=red' does not set an option of gtopk"):
        parse("gtopk:colour=red P=4 n=1M")


@pytest.mark.parametrize("suite", SUITES)
def test_the_text_of_each_cell_of_a_suite_is_parsed(suite: str) -> None:
    cells = cells_of(suite)
    assert cells
    assert [parse(cell.text) for cell in cells] == cells


def test_cells_are_grouped_by_link_without_repetition() -> None:
    a, b = parse("dense P=2 n=1M rate=1Gbit"), parse("gloo/all_reduce P=2 n=1M rate=1Gbit")
    other = parse("dense P=4 n=1M rate=1Gbit")
    assert by_link([a, other, b, a]) == [(a.link, [a, b]), (other.link, [other])]


# -- bounds, computed by hand ----------------------------------------------------------------------


def bound(text: str) -> float:
    found = bound_s(parse(text))
    assert found is not None
    return found


def test_bound_of_a_dense_exchange() -> None:
    # 102.4 MB: 2 * 3/4 * 102.4e6 bytes at 12.5e6 bytes a second are 12.288 s
    assert bound("dense P=4 n=25.6M rate=100Mbit") == pytest.approx(12.288)
    assert bound("gloo/all_reduce P=4 n=25.6M rate=100Mbit") == pytest.approx(12.288)
    # a byte for each element, and 2 for each 256
    assert bound("dense:values=int8 P=4 n=25.6M rate=100Mbit") == pytest.approx(12.288 / 4 * (1 + 2 / 256))
    # 2 * 7/8 * 102.4e6 / 12.5e6
    assert bound("dense P=8 n=25.6M rate=100Mbit") == pytest.approx(14.336)
    # 1.2288 s on the wire and 2 * 3 * 20 ms
    assert bound("dense P=4 n=25.6M rate=1Gbit delay=20ms") == pytest.approx(1.3488)


def test_bound_of_sparse_exchanges() -> None:
    # 8 + 25600 * (9 low bits + 2 values bytes) and the high bits: 3.5 bytes an entry, 7.2 ms each hop
    size = payload_bytes(parse("gtopk P=4 n=25.6M rate=100Mbit"))
    assert size is not None and 3.4 * 25_600 < size < 3.6 * 25_600
    hop_s = size / 12.5e6
    butterfly = "gtopk:topology=butterfly"
    assert bound(f"{butterfly} P=4 n=25.6M rate=100Mbit") == pytest.approx(2 * hop_s)  # 1, 2
    assert bound(f"{butterfly} P=8 n=25.6M rate=100Mbit delay=10ms") == pytest.approx(3 * (hop_s + 0.01))
    assert bound(f"{butterfly} P=6 n=25.6M rate=100Mbit") == pytest.approx(4 * hop_s)  # fold, 1, 2, back
    # three quarters of the entries to their owners, and three times a quarter back
    assert bound("gtopk P=4 n=25.6M rate=100Mbit delay=10ms") == pytest.approx(1.5 * hop_s + 2 * 0.01)
    assert bound("topk P=6 n=25.6M rate=100Mbit delay=10ms") == pytest.approx(5 * hop_s + 3 * 0.01)
    # 8 bytes an entry from each of three others: 614,400 bytes
    assert bound("gloo/all_gather P=4 n=25.6M rate=100Mbit") == pytest.approx(614_400 / 12.5e6)
    # there and back in a tree of two levels
    assert bound("mpi/gtopk P=4 n=25.6M rate=100Mbit") == pytest.approx(4 * 204_800 / 12.5e6)


def test_rounds_of_the_butterfly() -> None:
    assert {P: butterfly_rounds(P) for P in (2, 3, 4, 5, 8, 9, 32)} == {
        2: 1, 3: 3, 4: 2, 5: 4, 8: 3, 9: 5, 32: 5,
    }  # fmt: skip


def test_without_a_rate_there_is_no_bound() -> None:
    assert bound_s(parse("dense P=4 n=1M")) is None


def test_a_cell_has_a_default_density() -> None:
    assert Cell("dense", Link(2), 10).density == 0.001
