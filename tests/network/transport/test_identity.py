"""Key files, requirements on libzmq, and what an observer of the network sees."""

from __future__ import annotations

import os
import select
import socket
import stat
import subprocess
import sys
import threading

import pytest
import zmq

from gridtrain.core.messages import Channel, CollectivePhase, Data, PayloadSlot, RoundId
from gridtrain.errors import ConfigError, TransportError
from gridtrain.network.transport.identity import Identity, claim_identity, make_private_folder
from gridtrain.network.transport.interface import PeerUp, allow_all
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def in_processes(count: int, script: str, *arguments: object) -> list[subprocess.Popen]:
    """Runs the script in several processes; each waits for a line before its second part."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for _ in range(count)
    ]


# -- key pairs -----------------------------------------------------------------------------------


def test_the_public_key_belongs_to_the_secret_one():
    secret = bytes([9]) + bytes(31)  # RFC 7748, section 5.2: the first iteration
    public = "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert Identity.from_secret(secret).public.hex() == public


def test_two_identities_are_never_the_same():
    assert len({Identity.generate().public for _ in range(100)}) == 100


def test_the_secret_is_in_no_text():
    identity = Identity.generate()
    for text in (repr(identity), str(identity), f"{[identity]}"):
        assert identity.secret.hex() not in text and repr(identity.secret) not in text
        assert "public=" in text


@pytest.mark.parametrize("nbytes", [0, 31, 33])
def test_a_secret_has_32_bytes(nbytes):
    with pytest.raises(ConfigError, match=f"must be 32 bytes long; this one has {nbytes}"):
        Identity.from_secret(bytes(nbytes))


# -- key files -----------------------------------------------------------------------------------


def test_a_key_file_is_its_owners_alone_whatever_the_umask(tmp_path):
    old = os.umask(0o000)
    try:
        identity = Identity.load_or_create(tmp_path / "run" / "state" / "own.key")
    finally:
        os.umask(old)
    folder = tmp_path / "run" / "state"
    file = folder / "own.key"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, folder, folder.parent)]
    assert modes == [0o600, 0o700, 0o700]
    assert Identity.load_or_create(file) == Identity.read(file) == identity
    assert [path.name for path in folder.iterdir()] == ["own.key"]  # nothing half-written is left


def test_a_folder_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):  # not FileExistsError, because the folder does not exist
        make_private_folder(tmp_path / "file" / "state")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    Identity.generate().write(tmp_path / "own.key")
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "own.key").chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:04o}, so others may read it -> chmod 600"):
            Identity.read(tmp_path / "own.key")


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b"gridtrain secret key, keep it private: ", "cut", "more", "other"], ids=str
)
def test_a_damaged_key_file_says_so_and_shows_nothing(tmp_path, damage):
    path = tmp_path / "own.key"
    identity = Identity.load_or_create(path)
    text = path.read_bytes()
    damaged = {"cut": text[:-3], "more": text.strip() + b"00\n", "other": text.replace(b"secret", b"public")}
    path.write_bytes(damaged[damage] if isinstance(damage, str) else damage)
    with pytest.raises(ConfigError, match=r"does not contain a key|cannot be read") as caught:
        Identity.read(path)
    assert identity.secret.hex()[:16] not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_key_file_is_never_overwritten(tmp_path):
    first = Identity.load_or_create(tmp_path / "own.key")
    with pytest.raises(FileExistsError):
        Identity.generate().write(tmp_path / "own.key")
    assert Identity.read(tmp_path / "own.key") == first


def test_a_missing_key_file_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory -> check that"):
        Identity.read(tmp_path / "none.key")


def test_a_damaged_operator_key_is_deleted(tmp_path):
    (tmp_path / "operator.key").touch(0o600)
    with pytest.raises(ConfigError, match=r"the coordinator's next start creates a deleted operator\.key"):
        Identity.read(tmp_path / "operator.key")


def test_processes_that_race_for_a_new_key_file_get_the_same_key(tmp_path):
    script = (
        "import sys, pathlib; from gridtrain.network.transport.identity import Identity\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(Identity.load_or_create(pathlib.Path(sys.argv[1])).public.hex())"
    )
    processes = in_processes(4, script, tmp_path / "own.key")
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all at once
        process.stdin.write("go\n")
        process.stdin.flush()
    keys = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert keys == {Identity.read(tmp_path / "own.key").public.hex()}
    assert [path.name for path in tmp_path.iterdir()] == ["own.key"]


CLAIM = (
    "import sys, pathlib; from gridtrain.network.transport.identity import claim_identity\n"
    "with claim_identity(pathlib.Path(sys.argv[1]), fresh=True) as (identity, path):\n"
    "    print(identity.public.hex(), flush=True); sys.stdin.readline()"
)


def test_two_workers_of_a_machine_are_two_peers_and_the_same_two_after_a_restart(tmp_path):
    told = []
    for _ in range(2):
        processes = in_processes(2, CLAIM, tmp_path / "keys")
        told.append({process.stdout.readline().strip() for process in processes})
        for process in processes:
            process.communicate("done\n", timeout=60)
    assert len(told[0]) == 2 and told[0] == told[1]


def test_an_identity_is_free_again_when_its_process_was_killed(tmp_path):
    (process,) = in_processes(1, CLAIM, tmp_path)
    key = process.stdout.readline().strip()
    with claim_identity(tmp_path, fresh=True) as (other, _):
        assert other.public.hex() != key
    process.kill()
    process.wait(timeout=60)
    process.stdin.close()
    process.stdout.close()
    with claim_identity(tmp_path, fresh=True) as (again, _):
        assert again.public.hex() == key


# -- libzmq --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(4, 3, 4), (4, 2, 0)])
def test_an_old_libzmq_is_refused(monkeypatch, version):
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: version)
    monkeypatch.setattr(zmq, "zmq_version", lambda: ".".join(map(str, version)))
    with pytest.raises(ConfigError, match=r"is too old; encryption needs libzmq 4\.3\.5 or newer, built"):
        ZeroMQTransport(Identity.generate(), "test", gate=allow_all)
    ZeroMQTransport(Identity.generate(), "test", gate=allow_all, encrypted=False).close()


def test_a_libzmq_without_curve_is_refused(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(ConfigError, match="was built without CURVE"):
        ZeroMQTransport(Identity.generate(), "test", gate=allow_all)


def test_nobody_is_let_in_by_default():
    with pytest.raises(TypeError, match="gate"):
        ZeroMQTransport(Identity.generate(), "test")


# -- not encrypted -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "192.0.2.1", "localhost.example.org", "[::]"])
def test_without_encryption_a_transport_stays_on_its_machine(plain_net, host):
    anna = plain_net.add("anna")
    with pytest.raises(TransportError, match=r"cannot listen on .* without encryption, .* -> enable encr"):
        anna.transport.listen(f"tcp://{host}:0")
    with pytest.raises(TransportError, match=r"cannot dial .* without encryption"):
        anna.transport.dial(b"b" * 32, f"tcp://{host}:7000")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.53"])
def test_without_encryption_loopback_is_allowed(plain_net, host):
    address = plain_net.add("anna").transport.listen(f"tcp://{host}:0")
    plain_net.add("bert").transport.dial(plain_net.endpoints[0].key, address)
    plain_net.until(
        lambda: all(endpoint.of(PeerUp) for endpoint in plain_net.endpoints), *plain_net.endpoints
    )


def test_benchmarks_may_go_anywhere(plain_net):
    anna = plain_net.add("anna", plain_anywhere=True)
    assert anna.transport.listen("tcp://*:0").startswith("tcp://127.0.0.1:")


# -- on the way ----------------------------------------------------------------------------------


class Wiretap:
    """Forwards a TCP connection and records both directions."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._server = socket.create_server(("127.0.0.1", 0))
        self._target = (host, int(port))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.seen = {"to": bytearray(), "from": bytearray()}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection(self._target) as server:
            ways = {client: (server, "to"), server: (client, "from")}
            while True:
                for source in select.select(list(ways), [], [])[0]:
                    target, way = ways[source]
                    data = source.recv(65536)
                    if not data:
                        return
                    self.seen[way] += data
                    target.sendall(data)

    def close(self) -> None:
        self._thread.join(timeout=10.0)
        self._server.close()


def tapped(net):
    """anna dials bert through a wiretap, and sends a payload that is easy to find."""
    bert, anna = net.add("bert"), net.add("anna")
    tap = Wiretap(bert.transport.listen("tcp://127.0.0.1:0"))
    anna.transport.dial(bert.key, tap.address)
    net.until(lambda: anna.of(PeerUp) and bert.of(PeerUp), anna, bert)
    place = PayloadSlot(CollectivePhase.REDUCE)
    payload = b"a gradient, say " * 4096
    anna.transport.send(bert.key, Data(RoundId(1, 1, 0, 0), Channel(), place, 0, payload))
    net.until(lambda: bert.got(), bert, anna)
    sent = sum(anna.transport.traffic.sent_bytes.values())
    for endpoint in (anna, bert):
        endpoint.transport.close()
    tap.close()
    return tap, payload, sent


def test_who_listens_on_the_way_reads_nothing(zeromq_net, identity_of):
    tap, payload, _ = tapped(zeromq_net)
    everything = bytes(tap.seen["to"] + tap.seen["from"])
    assert len(everything) > len(payload)
    for secret in (payload[:16], b"gridtrain test", identity_of("anna").public, identity_of("bert").public):
        assert secret not in everything


def test_without_encryption_everything_can_be_read(plain_net, identity_of):
    tap, payload, _ = tapped(plain_net)
    assert payload in tap.seen["to"]
    assert b"gridtrain test" in tap.seen["from"] and identity_of("bert").public in tap.seen["from"]


@pytest.mark.parametrize("kind", ["zeromq_net", "plain_net"])
def test_traffic_counts_what_is_on_the_wire(request, kind):
    """All except the handshake and libzmq's own pings: a few hundred bytes."""
    tap, payload, sent = tapped(request.getfixturevalue(kind))
    handshake_bytes = len(tap.seen["to"]) - sent
    assert sent > len(payload)
    assert 60 < handshake_bytes < 800
