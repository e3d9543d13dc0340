"""Reported figures and names: valid on the wire, or refused with one sentence at the faulty line."""

import math

import pytest

from gridtrain.config import JoinConfig
from gridtrain.errors import ConfigError
from gridtrain.sdk.reported_figures import MAX_FIGURES, ReportedFigures, check_names


def test_a_figure_that_is_not_finite_is_left_out_and_logged_once(caplog):
    figures = ReportedFigures()
    assert figures.filter_valid({"loss": 0.5, "steps": 3}) == {"loss": 0.5, "steps": 3.0}
    assert figures.filter_valid({"loss": math.nan, "norm": 2.0, "rate": math.inf}) == {"norm": 2.0}
    assert figures.filter_valid({"loss": -math.inf}) == {}
    assert caplog.messages == ["loss=nan is not reported to the group, because it is not finite"]


def test_the_number_of_names_is_bounded():
    figures = ReportedFigures()
    for step in range(3):
        assert len(figures.filter_valid({f"figure {i}": step for i in range(MAX_FIGURES)})) == MAX_FIGURES
    with pytest.raises(ConfigError, match=r"^49 distinct figures were reported; the maximum is 48 -> "):
        figures.filter_valid({"one more": 1.0})
    assert figures.filter_valid({"figure 0": 1.0}) == {"figure 0": 1.0}


@pytest.mark.parametrize(
    "name", ["x" * 65, "\N{GREEK SMALL LETTER MU}" * 33, "a\x1b[31m", "a\nb", "anna\u200b"], ids=repr
)
def test_an_invalid_name_is_refused(name):
    bound = (
        "must be at most 64 bytes of UTF-8 without control or invisible characters or spaces at its ends -> "
        "choose a shorter, plain string$"
    )
    with pytest.raises(ConfigError, match=f"^the name of a figure is .*; it {bound}"):
        ReportedFigures().filter_valid({name: 1.0})
    with pytest.raises(ConfigError, match=f"^the name of this worker is .*; it {bound}"):
        check_names(JoinConfig("tcp://127.0.0.1:7700", "0" * 64, name=name))
    with pytest.raises(ConfigError, match=f"^the name of the run is .*; it {bound}"):
        check_names(JoinConfig("tcp://127.0.0.1:7700", "0" * 64, run=name))


def test_an_address_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match=r"^the advertised address is 130 bytes, .* at most 128 bytes"):
        check_names(JoinConfig("tcp://127.0.0.1:7700", "0" * 64, advertise="tcp://" + "a" * 124))


def test_the_longest_name_is_accepted():
    check_names(JoinConfig("tcp://127.0.0.1:7700", "0" * 64, run="r" * 64, name="n" * 64))
