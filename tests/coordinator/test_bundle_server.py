"""Workers receive the bundle's blocks, within the rate limit."""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.messages import MAX_BLOCK_BYTES
from gridtrain.tools.bundle import Bundle, digest_of
from gridtrain.tools.bundle.bundle_archive import pack
from gridtrain.tools.options.runfile import RunDescription
from gridtrain_coordinator.bundle_server import MAX_BUNDLES_PER_WORKER, RATE_WINDOW_S, BundleServer
from gridtrain_coordinator.run import events as ev

ANNA, BERT = b"a" * 32, b"b" * 32
FILES = {"train.py": bytes(MAX_BLOCK_BYTES + 5), "run.toml": b""}
ARCHIVE = pack(FILES)
RUN = RunDescription(script="train.py", requires=(("torch", "2.4"), ("numpy", "")))
BUNDLE = Bundle(digest_of(ARCHIVE), RUN, FILES, ARCHIVE)
DIGEST = bytes.fromhex(BUNDLE.digest.removeprefix("sha256:"))


def answer(
    server: BundleServer, peer: m.PeerId, index: int, now_s: float, digest: bytes = DIGEST
) -> m.Message:
    (effect,) = server.answer(peer, m.BundleRequest(digest, index), now_s)
    assert isinstance(effect, ev.Send) and effect.peer == peer
    return effect.message


def code(message: m.Message) -> str:
    assert isinstance(message, m.Refused) and message.remedy
    return message.code


def test_the_blocks_make_up_the_archive() -> None:
    server = BundleServer(BUNDLE)
    assert server.status() == {
        "digest": BUNDLE.digest,
        "bytes": len(ARCHIVE),
        "script": "train.py",
        "requires": ["torch>=2.4", "numpy"],
    }
    blocks = [answer(server, ANNA, index, 0.0) for index in range(2)]
    assert all(isinstance(block, m.BundleBlock) and block.total == 2 for block in blocks)
    assert b"".join(block.payload for block in blocks if isinstance(block, m.BundleBlock)) == ARCHIVE


def test_requests_without_a_matching_bundle_are_refused() -> None:
    assert code(answer(BundleServer(), ANNA, 0, 0.0)) == "no-bundle"
    assert BundleServer().status() is None
    server = BundleServer(BUNDLE)
    assert code(answer(server, ANNA, 2, 0.0)) == "bundle"
    assert code(answer(server, ANNA, 0, 0.0, b"x" * 32)) == "bundle"


def test_the_rate_limit_is_per_worker() -> None:
    server = BundleServer(BUNDLE)
    for _ in range(MAX_BUNDLES_PER_WORKER * 2):
        assert isinstance(answer(server, ANNA, 0, 0.0), m.BundleBlock)
    assert code(answer(server, ANNA, 0, RATE_WINDOW_S - 1)) == "too-often"
    assert isinstance(answer(server, BERT, 0, RATE_WINDOW_S - 1), m.BundleBlock)
    assert isinstance(answer(server, ANNA, 0, RATE_WINDOW_S), m.BundleBlock)
