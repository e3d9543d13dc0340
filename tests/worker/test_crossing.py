"""Several workers of one machine, each with an invitation of its own, started in any order.

machine   first                then
A  B      A alone, it stops    B, and A beside it: both are in
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE
from threading import Barrier

import pytest
from live_coordinator import LiveCoordinator

from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import RemoveWorker
from gridtrain.errors import ConfigError, CoordinatorUnreachable, JoinRefused
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.enrollment import Answer, Enrollment, ask_coordinator, enroll
from gridtrain.runtime.client.invitation_store import STORE_FILE

WITHIN_S = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def key(entry: Enrollment) -> bytes:
    return Identity.read(entry.identity).public


def test_an_unused_invitation_admits_the_other_worker(
    coordinator: LiveCoordinator, state: Path, stack: ExitStack
) -> None:
    first, second = coordinator.invitation(), coordinator.invitation()
    with enroll(first, WITHIN_S) as alone:
        known = key(alone)
    b = stack.enter_context(enroll(second, WITHIN_S))  # finds the machine's key, and spends nothing
    (book,) = state.rglob(STORE_FILE)
    assert key(b) == known and second.text() in book.read_text()
    assert S_IMODE(book.stat().st_mode) == 0o600
    a = stack.enter_context(
        enroll(first, WITHIN_S)
    )  # used up: it uses the invitation that the other one did not need
    assert key(a) != known
    assert second.text() not in book.read_text(), "it is spent"
    with pytest.raises(JoinRefused, match=r"in use by other workers -> .* another invitation"):
        stack.enter_context(enroll(first, WITHIN_S))  # two invitations are two workers


def test_an_invitation_that_is_refused_leaves_no_key(
    coordinator: LiveCoordinator, state: Path, stack: ExitStack
) -> None:
    invitation = coordinator.invitation()
    never = replace(invitation, token=b"t" * 32)
    elsewhere = replace(invitation, coordinator=Identity.generate().public)
    for bad, error in ((never, JoinRefused), (elsewhere, CoordinatorUnreachable)):
        with pytest.raises(error):
            stack.enter_context(enroll(bad, 3.0))
        assert not list(state.rglob("*.key"))
    with enroll(invitation, WITHIN_S) as entry:
        admitted = key(entry)
        with pytest.raises(JoinRefused):
            stack.enter_context(enroll(never, WITHIN_S))  # for a second worker
        assert list(state.rglob("*.key")) == [entry.identity]
    with enroll(never, WITHIN_S) as entry:
        assert key(entry) == admitted, "a machine that was admitted needs no further invitation"


def test_two_workers_can_enroll_at_once(coordinator: LiveCoordinator, stack: ExitStack) -> None:
    first, second = coordinator.invitation(), coordinator.invitation()
    with enroll(first, WITHIN_S):
        pass
    for _ in range(3):  # in either order
        both = Barrier(2)

        def start(invitation: Invitation, both: Barrier = both) -> bytes:
            both.wait(WITHIN_S)
            with enroll(invitation, WITHIN_S) as entry:
                both.wait(WITHIN_S)  # both are admitted at the same time
                return key(entry)

        with ThreadPoolExecutor(2) as pool:
            keys = list(pool.map(start, (second, first)))
        assert len(set(keys)) == 2


def test_a_removed_worker_needs_a_new_invitation(coordinator: LiveCoordinator, stack: ExitStack) -> None:
    once, often = coordinator.invitation(), coordinator.invitation(uses=9)
    with enroll(once, WITHIN_S) as entry:
        peer = key(entry)
        assert ask_coordinator(entry, WITHIN_S) == Answer(is_finished=False)
        coordinator.operator_client().order(RemoveWorker(peer, False, "too slow"))
        assert ask_coordinator(entry, WITHIN_S) == Answer(refusal="denied")
    digits = peer.hex()[:12]
    expected = (
        f'this worker, key {digits}, was removed from the run "default" .* -> ask the run\'s owner for a new'
    )
    for _ in range(2):
        with pytest.raises(JoinRefused, match=expected):
            stack.enter_context(enroll(once, WITHIN_S))
    with pytest.raises(
        JoinRefused, match=r"^this worker was removed from the run: too slow -> ask the run's owner"
    ):
        stack.enter_context(enroll(often, WITHIN_S))  # an earlier invitation: no other key is made for it
    assert len(list(entry.identity.parent.glob("*.key"))) == 1
    with enroll(coordinator.invitation(), WITHIN_S) as again:
        assert key(again) == peer


def test_a_banned_worker_is_refused_with_the_remedy(coordinator: LiveCoordinator, stack: ExitStack) -> None:
    with enroll(coordinator.invitation(), WITHIN_S) as entry:
        peer = key(entry)
    coordinator.operator_client().order(RemoveWorker(peer, True, "spam"))
    digits = peer.hex()[:12]
    with pytest.raises(JoinRefused, match=f"banned this worker's key {digits}: spam -> .*unban {digits}"):
        stack.enter_context(enroll(coordinator.invitation(), WITHIN_S))


def test_the_other_worker_of_a_machine_stays_admitted(coordinator: LiveCoordinator, stack: ExitStack) -> None:
    often = coordinator.invitation(uses=2)
    with enroll(often, WITHIN_S) as one, enroll(often, WITHIN_S) as two:
        peers = key(one), key(two)
    coordinator.operator_client().order(RemoveWorker(peers[0], False, ""))
    assert key(stack.enter_context(enroll(often, WITHIN_S))) == peers[1]
    with pytest.raises(JoinRefused, match="was removed from the run"):
        stack.enter_context(enroll(often, WITHIN_S))


@pytest.mark.parametrize("banned", [False, True])
def test_a_removed_worker_does_not_take_the_free_key_of_another_one(
    coordinator: LiveCoordinator, stack: ExitStack, banned: bool
) -> None:
    anna, ben, cleo = (coordinator.invitation() for _ in range(3))
    stack.enter_context(enroll(anna, WITHIN_S))
    with enroll(ben, WITHIN_S) as bens, enroll(cleo, WITHIN_S) as cleos:
        peers = key(bens), key(cleos)
    coordinator.operator_client().order(RemoveWorker(peers[1], banned, "too slow"))
    with pytest.raises(JoinRefused, match="was removed from the run"):
        stack.enter_context(enroll(cleo, WITHIN_S))
    if not banned:  # with a new invitation it may take any free key of the machine, and ben the other one
        again = stack.enter_context(enroll(coordinator.invitation(), WITHIN_S))
        bens = stack.enter_context(enroll(ben, WITHIN_S))
        assert {key(again), key(bens)} == {*peers}
    else:
        assert key(stack.enter_context(enroll(ben, WITHIN_S))) == peers[0], "ben may return"


def test_a_folder_that_cannot_be_written_to_is_reported(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    invitation = coordinator.invitation()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written to: Not a directory -> .*XDG_STATE_HOME"):
        stack.enter_context(enroll(invitation, WITHIN_S))


def test_a_damaged_record_of_invitations_is_ignored(coordinator: LiveCoordinator, state: Path) -> None:
    invitation = coordinator.invitation()
    with enroll(invitation, WITHIN_S) as entry:
        peer = key(entry)
    (book,) = state.rglob(STORE_FILE)
    for text in ("{", "[]", '{"used": 3, "spare": []}', '{"used": {}, "spare": ["gridtrain1:x"]}'):
        book.write_text(text)
        with enroll(invitation, WITHIN_S) as again:
            assert key(again) == peer
