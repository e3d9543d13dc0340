"""Texts of other parties: the coordinator's status, addresses, invitations."""

from __future__ import annotations

import json
from random import Random

from gridfuzz.mutate import JSON
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.cli.status import render
from gridtrain.core.group import invitation
from gridtrain.core.messages import relay_of
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.runtime.client.coordinator_client import MAX_TEXT, _parse_status, parse_coordinator_address
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain_coordinator.run import route_table

# -- status: input is the payload of StatusReply --------------------------------------------------


def run_status(data: bytes) -> bool:
    try:
        status = _parse_status("tcp://there:1", data)
    except RemoteProtocolError:
        return False
    _check_printable(status, 0)
    render(status)
    return True


def _check_printable(value: object, depth: int) -> None:
    match value:
        case str():
            must(len(value) <= MAX_TEXT and value.isprintable(), "an unchecked text reaches the terminal")
        case list():
            for item in value[:100]:
                _check_printable(item, depth + 1)
        case dict():
            for key, item in value.items():
                _check_printable(key, depth + 1)
                _check_printable(item, depth + 1)


def valid_status(random: Random) -> bytes:
    figures = {"loss": random.random(), "computing_s": random.choice((0.01, 3.0, None, "x"))}
    member = {"rank": random.choice((0, None)), "name": "a\u202e\x1b[31m", "state": "active", "share": 4}
    member |= {"figures": figures, "last_heard_s": 0.1, "sent_Bps": random.choice((0, 1e3, 1e300, True))}
    event = {"at_s": 1.5, "event": "joined", "name": "[bold]x"}
    status = {
        **{
            "run": "r",
            "phase": random.choice(("training", "no such")),
            "term": 1,
            "generation": 2,
            "step": 3,
        },
        **{"facts": {"model": "x" * random.choice((1, 600))}, "members": [member] * random.randrange(3)},
        **{"events": [event] * random.randrange(8), "now_s": 2.0, "steps_per_s": 0.1, "finished": False},
    }
    return json.dumps(status, ensure_ascii=random.random() < 0.5).encode()


def change_json(data: bytes, random: Random) -> bytes:
    """Change one value somewhere."""
    odd = (
        None,
        True,
        -1,
        0,
        1.5,
        1e308,
        10**400,
        "",
        "x" * 600,
        "\x1b[2J",
        [],
        [[]],
        {},
        {"a": 1},
        [None] * 9,
    )
    try:
        plain = json.loads(data)
        plain = _replaced(plain, random, odd)
        return json.dumps(plain).encode()
    except (ValueError, RecursionError):
        return data


def _replaced(node: object, random: Random, odd: tuple[object, ...]) -> object:
    if isinstance(node, dict) and node and random.random() < 0.85:
        key = random.choice(list(node))
        if random.random() < 0.15:
            return {k: v for k, v in node.items() if k != key}
        return {**node, key: _replaced(node[key], random, odd)}
    if isinstance(node, list) and node and random.random() < 0.85:
        at = random.randrange(len(node))
        if random.random() < 0.15:
            return node[:at] + node[at:][: random.randrange(2)] * 2
        return [*node[:at], _replaced(node[at], random, odd), *node[at + 1 :]]
    if isinstance(node, int | float) and random.random() < 0.5:
        return random.choice((node + 1, -node, 2**63 - 1, 2**63, 2**64, 1e19, 0.5))
    if isinstance(node, str) and node and random.random() < 0.5:
        return random.choice((node[:-1], node + node, node.upper(), "zz", "00"))
    return random.choice(odd)


# -- addresses: input is UTF-8 ---------------------------------------------------------------------


def run_addresses(data: bytes) -> bool:
    text = data.decode(errors="replace")
    accepted = False
    try:
        address = parse_coordinator_address(text)
        must(address.startswith("tcp://") and len(address) < len(text) + 20, "the address is different")
        accepted = True
    except ConfigError:
        pass
    key = relay_of(text)
    must(key is None or (len(key) == 32 and text == f"relay:{key.hex()}"), "a relay's key is not 32 bytes")
    source = Source(data)
    host = source.bytes(source.byte() % 24).decode(errors="replace").rstrip("\0")
    place = route_table.PeerLocation(source.rest().decode(errors="replace"), host, "")
    for candidate in route_table.dial_back_addresses(place):
        must(
            candidate == place.claimed_address or candidate.startswith("tcp://"),
            "a candidate that is no TCP address",
        )
    folder = state_directory(text)
    must(
        "gridtrain" in folder.parts[-2:] and ".." not in folder.parts,
        f"a run's name leads outside of its folder: {text!r}",
    )
    must(not invitation.RUN_NAME.fullmatch(text) or folder.name == text, f"two runs share a folder: {text!r}")
    _check_candidates(Source(data))
    return accepted


def _check_candidates(source: Source) -> None:
    """For any claims and failed attempts of workers, both sides of a pair receive matching addresses."""
    coordinator, peers = b"C" * 32, [bytes([letter]) * 32 for letter in b"abcd"]
    known, addresses = (
        route_table.RouteTable(coordinator),
        ("", "tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "nonsense"),
    )
    for peer in peers:
        claimed, proven = source.choice(addresses), source.choice(addresses)
        known.set_location(
            peer,
            route_table.PeerLocation(claimed, source.choice(("", "h", "i")), proven, not source.one_in(4)),
        )
    relays = known.relay_candidates(peers)
    for _ in range(source.byte() % 12):
        viewer, other = source.choice(peers), source.choice(peers)
        if viewer == other:
            continue
        known.block(viewer, other, relays)
        there, back = known.address(viewer, other, relays), known.address(other, viewer, relays)
        must(bool(there or back), "neither of two members is to dial the other")
        relay = relay_of(there)
        if relay is not None:
            must(relay_of(back) == relay, "two members are to use two relays")
            must(relay == coordinator or relay in relays, "a relay that does not relay")
            must(relay not in (viewer, other), "a member is its own relay")


def valid_address(random: Random) -> bytes:
    host = random.choice(
        ("127.0.0.1", "[::1]", "[fe80::1%eth0]", "host.example", "a_b", "host.example", "*", "..")
    )
    address = random.choice(("tcp://", "")) + host + random.choice(("", ":1", ":7700", ":65536"))
    others = ("relay:" + random.randbytes(32).hex(), "10.0.0.7\0" + address, f" {address}\n", "memory://x")
    return (address if random.random() < 0.6 else random.choice(others)).encode()


# -- invitation: input is UTF-8 --------------------------------------------------------------------


def run_invitation(data: bytes) -> bool:
    text = data.decode(errors="replace")
    meant = invitation.looks_like(text)
    try:
        parsed = invitation.parse(text)
    except ConfigError as error:
        must(len(str(error)) < 1000, "a refusal repeats the whole input")
        return False
    must(meant, "a text that does not look like an invitation")
    must(invitation.parse(parsed.text()) == parsed, "an invitation changes when it is written and read")
    must(parsed.token.hex() not in repr(parsed), "the token is visible")
    return True


def valid_invitation(random: Random) -> bytes:
    run = random.choice(("default", "r", "a.b-c_d", "x" * 64))
    made = invitation.Invitation(
        random.choice(("tcp://192.168.1.20:7700", "tcp://[::1]:1", "memory://c")),
        random.randbytes(32),
        random.randbytes(32),
        run,
        random.random() < 0.5,
    )
    text = made.text()
    return random.choice((text, f'"{text}"\n', " ".join(text), text.replace("1:", "2:"), text[:-1])).encode()


def change_invitation(data: bytes, random: Random) -> bytes:
    """Damage what the checksum covers, and correct the checksum."""
    import base64

    text = data.decode(errors="replace").strip()
    packed = text.removeprefix(invitation.PREFIX)
    try:
        body = bytearray(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))[:-8]
    except ValueError:
        return data
    for _ in range(random.choice((1, 1, 2, 8))):
        if body:
            at = random.choice((0, 65, random.randrange(len(body)), len(body) - 1))
            match random.randrange(4):
                case 0 if at < len(body):
                    body[at] = random.randrange(256)
                case 1:
                    body[at:at] = random.choice((b"\0", b"\xff", b"/", b"..", b"\n", b"x" * 100))
                case 2:
                    del body[at:]
                case _:
                    del body[at : at + 1]
    made = base64.urlsafe_b64encode(bytes(body) + invitation.checksum(bytes(body))).decode()
    return (invitation.PREFIX + made.rstrip("=")).encode()


TARGETS = (
    Target(
        "status",
        "a coordinator's reply to `gridtrain status`, down to the table",
        run_status,
        valid_status,
        ("gridtrain.cli.status",),
        change_json,
        JSON,
    ),
    Target(
        "addresses",
        "addresses, relays and run names",
        run_addresses,
        valid_address,
        ("gridtrain_coordinator.run.route_table",),
        None,
        (b"tcp://", b"relay:", b":0", b":65536", b"[", b"]", b"%", b"..", b"/", b"\0", "\u202e".encode()),
        max_bytes=1024,
    ),
    Target(
        "invitation",
        "a text that a user pastes as an invitation",
        run_invitation,
        valid_invitation,
        ("gridtrain.core.group.invitation",),
        change_invitation,
        (b"gridtrain1:", b"gridtrain2:", b"gridtrain", b"=", b"-", b"_", b"+", b"/", b" ", "\u200b".encode()),
    ),
)
