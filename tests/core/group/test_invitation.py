"""Invitations: characters added by mail programs are ignored, altered texts are refused."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gridtrain.core.group import invitation as module
from gridtrain.core.group.invitation import MAX_TEXT_LENGTH, PREFIX, Invitation, looks_like, parse
from gridtrain.errors import ConfigError

KEY, TOKEN = bytes(range(32)), bytes(range(100, 132))
ONE = Invitation("tcp://192.0.2.7:7700", KEY, TOKEN, "default")
TEXT = ONE.text()

hosts = st.text(string.ascii_lowercase + string.digits + ".-", min_size=1, max_size=100)
invitations = st.builds(
    Invitation,
    address=st.builds("tcp://{}:{}".format, hosts, st.integers(1, 65535)),
    coordinator=st.binary(min_size=32, max_size=32),
    token=st.binary(min_size=32, max_size=32),
    run=st.from_regex(module.RUN_NAME, fullmatch=True),
    encrypted=st.booleans(),
)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.remedy, "says what to do next"
    return caught.value.reason


def test_the_text_of_an_invitation() -> None:
    assert (
        "gridtrain1:AQABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4fZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1-f4CBgoMH"
        "ZGVmYXVsdHRjcDovLzE5Mi4wLjIuNzo3NzAw" + TEXT[-11:]
    ) == TEXT
    assert parse(TEXT) == ONE


@given(invitations)
@example(Invitation("tcp://" + "x" * 122, KEY, TOKEN, "r" * 64))
def test_an_invitation_survives_the_round_trip(invitation: Invitation) -> None:
    text = invitation.text()
    assert parse(text) == invitation and len(text) <= MAX_TEXT_LENGTH
    assert set(text) <= set(string.ascii_letters + string.digits + "-_:"), "no shell needs it quoted"


def test_the_token_is_not_shown() -> None:
    shown = f"{ONE} {ONE!r}"
    assert "token" not in shown and repr(TOKEN) not in shown and TOKEN.hex() not in shown


@pytest.mark.parametrize(
    "pasted",
    [
        f"  {TEXT}\n",
        f'"{TEXT}"',
        f"\u201c{TEXT}\u201d",
        f"`{TEXT}`",
        f"<{TEXT}>",
        "\r\n".join(TEXT[i : i + 72] for i in range(0, len(TEXT), 72)),
        f"{TEXT[:50]}\u00a0{TEXT[50:90]}\u200b{TEXT[90:]}",
    ],
    ids=["spaces", "quotes", "typographic", "backquotes", "angles", "wrapped", "invisible"],
)
def test_characters_added_by_mail_programs_are_ignored(pasted: str) -> None:
    assert parse(pasted) == ONE


def test_every_change_of_one_letter_is_refused() -> None:
    """All 93 other printable characters at all positions: none of about 14,000 is accepted."""
    printable = [chr(code) for code in range(33, 127)]
    accepted = []
    for position, letter in enumerate(TEXT):
        for other in printable:
            changed = TEXT[:position] + other + TEXT[position + 1 :]
            if other != letter and is_accepted(changed):
                accepted.append((position, other))
    assert accepted == []


def is_accepted(text: str) -> bool:
    try:
        parse(text)
    except ConfigError:
        return False
    return True


@given(invitations, st.data())
def test_a_changed_a_missing_and_a_doubled_letter_are_refused(
    invitation: Invitation, data: st.DataObject
) -> None:
    text = invitation.text()
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="utf-8"))
    changed = text[:position] + other + text[position + 1 :]
    assert other == text[position] or not is_accepted(changed)
    assert not is_accepted(text[:position] + text[position + 1 :])
    doubled = text[: position + 1] + text[position:]
    assert not is_accepted(doubled)


def test_a_truncated_invitation_is_refused() -> None:
    for length in range(len(PREFIX), len(TEXT)):
        assert refusal(TEXT[:length]) == "this invitation was cut short or altered in transit"


def test_an_invitation_of_a_newer_gridtrain_is_refused() -> None:
    assert "made by a newer gridtrain" in refusal(TEXT.replace("gridtrain1:", "gridtrain2:"))
    assert "newer" not in refusal(TEXT.replace("gridtrain1:", "gridtrain0:"))


@pytest.mark.parametrize("text", ["tcp://192.0.2.7:7700", "hello", "Gridtrain1:AQAB", "x" * 100_000])
def test_text_that_is_no_invitation_is_refused(text: str) -> None:
    assert "is not an invitation; an invitation begins with gridtrain1:" in refusal(text)
    assert refusal(" ''\n") == "no invitation was given"
    assert not looks_like(text)


def test_invitations_are_distinguished_from_addresses() -> None:
    assert looks_like(f' "{TEXT}"') and looks_like("gridtrain7:") and not looks_like("gridtrain")


def test_an_invitation_that_is_too_long_is_refused() -> None:
    assert "altered in transit" in refusal(PREFIX + "A" * 10_000_000)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"address": "ipc:///tmp/socket"}, "address"),
        ({"address": "tcp://a b"}, "address"),
        ({"address": "tcp://" + "x" * 123}, "address"),
        ({"run": "../up"}, "valid run name"),
        ({"run": ""}, "valid run name"),
        ({"coordinator": b"short"}, "32 bytes"),
        ({"token": b"short"}, "32 bytes"),
    ],
)
def test_fields_out_of_bounds_cannot_be_packed_or_unpacked(changes: dict[str, object], words: str) -> None:
    fields = {"address": ONE.address, "coordinator": KEY, "token": TOKEN, "run": "default"} | changes
    with pytest.raises(ConfigError, match=words):
        Invitation(**fields)  # type: ignore[arg-type]
    forged = object.__new__(Invitation)  # an attacker does not use our constructor
    for name, value in (fields | {"encrypted": True}).items():
        object.__setattr__(forged, name, value)
    assert not is_accepted(forged.text())
