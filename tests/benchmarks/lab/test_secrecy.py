"""An eavesdropper on the internet's bridge and a relay see no gradients, state or names of three workers.

                 hub 10.77.0.2: coordinator, and the relay between anna and bert
                      |
    ------+-----------+-----------+--------- bridge, where the eavesdropper sits
          | NAT       | NAT       |
        anna        bert        cleo         anna and bert cannot dial each other

Each process records samples of the gradients and the state that it sends, and all that it receives
(spy/sitecustomize.py).  Without encryption the eavesdropper finds the samples and the names, which shows that
it would find them with encryption, too.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_transfer import say
from sniffer import Sniffer
from zmq.utils import z85

from lab.group import Group, LabHosts, hostname
from lab.net import Net

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "integration" / "scripts" / "train.py"
SPY = Path(__file__).parent / "spy"
NAMES = ("anna-fe64a1", "bert-07bd93", "cleo-c31d58")
STEPS = 30
MAX_SAMPLES = 150
TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Recording:
    """A finished run.

    Attributes:
        samples: bytes of payloads by message ("Data": gradients; "StateBlock": parameters).
        received: all frames that a member received, decrypted, by its name; "hub" is the coordinator.
    """

    net: Net
    hosts: LabHosts
    group: Group
    sniffer: Sniffer
    samples: dict[str, list[bytes]]
    received: dict[str, bytes]


def record(
    folder: Path, *, encrypted: bool, nat: str = "none", options: Sequence[str] = ()
) -> Iterator[Recording]:
    spied = folder / "spied"
    spied.mkdir()
    path = os.pathsep.join(filter(None, [str(SPY), os.environ.get("PYTHONPATH")]))
    spy = {"PYTHONPATH": path, "LAB_SPY": str(spied)}
    run = json.dumps({"exchange": "dense", "batch_size": 8, "steps": STEPS})
    with Net() as net:
        hosts = LabHosts(net, NAMES, nat=nat)
        with (
            Sniffer(net) as sniffer,
            Group(hosts, folder, workers=len(NAMES), encrypted=encrypted, env=spy) as group,
        ):
            for name in NAMES:
                group.add(name, (sys.executable, str(SCRIPT), run), options)
            group.finish(TIMEOUT_S)
        lines = [line.split() for path in spied.glob("*.sent") for line in path.read_text().splitlines()]
        samples = {
            kind: chosen([bytes.fromhex(text) for what, text in lines if what == kind])
            for kind in ("Data", "StateBlock")
        }
        received = {
            name: b"\n".join(path.read_bytes() for path in spied.glob(f"{name}-*.received"))
            for name in (*NAMES, "hub")
        }
        yield Recording(net, hosts, group, sniffer, samples, received)


def chosen(samples: Sequence[bytes]) -> list[bytes]:
    """Choose some samples of the whole run."""
    different = sorted(set(samples))
    return random.Random(0).sample(different, min(MAX_SAMPLES, len(different)))


@pytest.fixture(scope="module")
def clear(lab: None, whole_group: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    yield from record(tmp_path_factory.mktemp("clear"), encrypted=False)


@pytest.fixture(scope="module")
def encrypted(lab: None, whole_group: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    # Only the hub relays, so that all relayed gradients pass through it.
    yield from record(
        tmp_path_factory.mktemp("encrypted"), encrypted=True, nat="half", options=["--no-relay"]
    )


# -- secrets ---------------------------------------------------------------------------------------


def forms(secret: bytes) -> list[bytes]:
    """Return the encodings in which 32 bytes might be sent."""
    text = (secret.hex().encode(), secret.hex().upper().encode(), z85.encode(secret))
    in_64 = (base64.b64encode(secret), base64.urlsafe_b64encode(secret))
    return [
        secret,
        *text,
        *(word.rstrip(b"=")[:-1] for word in in_64),
    ]  # the last letter depends on the bytes that follow


def secrets_of(group: Group) -> dict[str, list[bytes]]:
    """Return the encodings of all secret keys, of the invitation's token, and the invitation, by name."""
    from gridtrain.core.group.invitation import PREFIX, parse
    from gridtrain.network.transport.identity import Identity

    paths = sorted(group.folder.glob("state-*/**/*.key"))
    secrets = {path.relative_to(group.folder).as_posix(): forms(Identity.read(path).secret) for path in paths}
    secrets["token"] = forms(parse(group.invitation()).token)
    secrets["invitation"] = [group.invitation().removeprefix(PREFIX).encode()]
    return secrets


def personal() -> list[bytes]:
    return [word.encode() for name in NAMES for word in (name, hostname(name))]


def seen(find: Callable[[bytes], object], patterns: Sequence[bytes]) -> list[bytes]:
    return [pattern for pattern in patterns if find(pattern)]


# -- the eavesdropper ------------------------------------------------------------------------------


def test_without_encryption_an_eavesdropper_finds_every_gradient_the_state_and_the_names(
    clear: Recording,
) -> None:
    assert not clear.sniffer.dropped
    assert len(clear.samples["Data"]) > 50 and clear.samples["StateBlock"]
    for kind, samples in clear.samples.items():
        found = seen(clear.sniffer.found, samples)
        print(f"{kind}: {len(found)} of {len(samples)} samples found")
        assert found == samples
    assert seen(clear.sniffer.found, [name.encode() for name in NAMES]) == [name.encode() for name in NAMES]


def test_with_encryption_an_eavesdropper_finds_neither_gradients_nor_state(encrypted: Recording) -> None:
    assert not encrypted.sniffer.dropped
    assert len(encrypted.samples["Data"]) > 50 and encrypted.samples["StateBlock"]
    for samples in encrypted.samples.values():
        assert seen(encrypted.sniffer.found, samples) == []


def test_with_encryption_an_eavesdropper_finds_no_key_token_name_or_hostname(encrypted: Recording) -> None:
    secrets = secrets_of(encrypted.group)
    assert len(secrets) >= 3 + 1 + 2, "keys of three workers and the coordinator, token, invitation"
    for what, patterns in secrets.items():
        assert seen(encrypted.sniffer.found, patterns) == [], what
    assert seen(encrypted.sniffer.found, personal()) == []


def test_the_eavesdropper_finds_each_of_them_if_sent_in_plain_text(encrypted: Recording) -> None:
    patterns = [pattern for forms in secrets_of(encrypted.group).values() for pattern in forms]
    patterns += [*personal(), *encrypted.samples["Data"]]
    anna, hub = encrypted.hosts[NAMES[0]], encrypted.hosts.hub
    with Sniffer(encrypted.net) as sniffer:
        say(anna, hub, b" ".join(patterns))
    assert seen(sniffer.found, patterns) == patterns


# -- the relay -------------------------------------------------------------------------------------


def test_the_relay_forwards_gradients_that_it_cannot_read(encrypted: Recording) -> None:
    """A ring of three has all three edges, so one third of the gradients passes through the hub."""
    hub, workers = encrypted.received["hub"], [encrypted.received[name] for name in NAMES]
    data = encrypted.samples["Data"]
    by_workers = seen(lambda pattern: any(pattern in received for received in workers), data)
    assert by_workers == data, "the members decrypt them, so the spy works"
    smallest = min(len(received) for received in workers)
    assert len(hub) > smallest / 2, f"the hub received {len(hub)} bytes, less than anna and bert exchange"
    for samples in encrypted.samples.values():
        assert seen(hub.__contains__, samples) == []
    for what, patterns in secrets_of(encrypted.group).items():
        assert seen(hub.__contains__, patterns) == [], what
    assert seen(hub.__contains__, [hostname(name).encode() for name in NAMES]) == []
