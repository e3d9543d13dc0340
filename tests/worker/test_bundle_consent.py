"""A bundle from a real coordinator: fetched, shown, accepted by its digest, and only then run."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from faulty_http_server import Server
from live_coordinator import LiveCoordinator

from gridtrain import extras
from gridtrain.cli import consent_prompt
from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import ConfigError, DataError, NotAccepted, RemoteProtocolError
from gridtrain.extras import require_packages
from gridtrain.runtime.client import bundle_fetch
from gridtrain.tools.bundle import Bundle, digest_of
from gridtrain.tools.options import RunFile, resolve
from gridtrain.tools.options.runfile import DatasetDescription, RunDescription
from gridtrain.training.data.shard_files import ShardCache
from gridtrain.training.data.shard_index import build_index, write_index
from gridtrain_coordinator.bundle_server import BundleServer
from gridtrain_worker import agent, bundle_consent
from gridtrain_worker.agent import Job, supervise
from gridtrain_worker.bundle_consent import BundleOffer
from gridtrain_worker.saved_settings import SavedSettings

pytestmark = pytest.mark.integration
SCRIPT = """
import os, pathlib, sys
import helper
pathlib.Path(sys.argv[1]).write_text(os.environ["GRIDTRAIN_DATA_DIR"] + " " + helper.WORD)
"""


class Owner:
    """A folder with a run.toml, and the bundle server with the bundle of that folder."""

    def __init__(self, folder: Path, coordinator: LiveCoordinator) -> None:
        self.folder, self.coordinator, self.mark = folder, coordinator, folder / "mark"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "helper.py").write_text("WORD = 'one'\n")
        self.describe()

    def describe(self, more: str = "") -> None:
        (self.folder / "run.toml").write_text(
            f'[run]\nscript = "train.py"\nfiles = ["helper.py"]\narguments = ["{self.mark}"]\n{more}'
        )

    def serve(self) -> str:
        """Serve the bundle of the present files; return its digest."""
        bundle = Bundle.from_run_file(RunFile.find({}, self.folder))
        assert bundle is not None
        self.coordinator.daemon._bundle_server = BundleServer(bundle)
        return bundle.digest

    def ran(self) -> str:
        """The text that the script wrote; empty if it did not run."""
        text = self.mark.read_text() if self.mark.exists() else ""
        self.mark.unlink(missing_ok=True)
        return text


@pytest.fixture
def owner(coordinator: LiveCoordinator, tmp_path: Path) -> Iterator[Owner]:
    folder = tmp_path / "owner"
    folder.mkdir()
    yield Owner(folder, coordinator)
    coordinator.daemon._bundle_server = BundleServer()


def folder_of(state: Path, invitation: Invitation, digest: str) -> Path:
    home = state / "gridtrain" / "default" / "bundles" / invitation.coordinator.hex()[:16]
    return home / digest.removeprefix("sha256:")[:32] / "files"


def test_a_bundle_runs_once_it_is_accepted_and_a_changed_one_asks_again(
    owner: Owner, invitation: Invitation, state: Path
) -> None:
    asked: list[str] = []

    def ask(offer: BundleOffer) -> bool:
        assert not owner.mark.exists(), "nothing runs before the answer"
        assert (offer.folder / "train.py").read_text() == SCRIPT, "it can be read before"
        asked.append(offer.bundle.digest)
        return len(asked) > 1

    job = Job((), invitation)
    first = owner.serve()
    with pytest.raises(NotAccepted, match="did not accept"):
        supervise(job, ask=ask)
    assert owner.ran() == ""
    assert supervise(job, ask=ask) == 0
    folder = folder_of(state, invitation, first)
    assert owner.ran() == f"{folder} one" and asked == [first] * 2

    def never_asked(offer: BundleOffer) -> bool:
        raise AssertionError("it was accepted")

    assert supervise(job, ask=never_asked) == 0 and owner.ran().endswith(" one")

    (owner.folder / "helper.py").write_text("WORD = 'two'\n")
    second = owner.serve()
    with pytest.raises(NotAccepted, match=f"bundle {second} has not been accepted on this machine") as caught:
        supervise(job)
    assert f"--accept {second}" in caught.value.remedy and owner.ran() == ""
    assert supervise(job, ask=ask) == 0
    assert owner.ran().endswith(" two") and asked == [first, first, second]


def test_only_a_bundle_with_an_accepted_digest_runs(owner: Owner, invitation: Invitation) -> None:
    digest = owner.serve()
    for other in (digest[:-1] + ("0" if digest[-1] != "0" else "1"), digest[:20]):
        with pytest.raises(NotAccepted, match="but --accept specifies"):
            supervise(Job((), invitation, accept=other))
    assert owner.ran() == ""
    assert supervise(Job((), invitation, accept=digest.removeprefix("sha256:"))) == 0
    assert owner.ran().endswith(" one")
    assert supervise(Job((), invitation)) == 0, "the consent is stored"


def test_a_dry_run_starts_nothing_and_accepts_nothing(owner: Owner, invitation: Invitation) -> None:
    seen: list[tuple[Job, BundleOffer | None]] = []
    digest = owner.serve()
    dry = Job((), invitation, dry_run=True, accept=digest, name="anna")
    assert supervise(dry, show=lambda job, offer: seen.append((job, offer))) == 0
    ((job, offer),) = seen
    assert offer is not None and offer.bundle.digest == digest and job.name == "anna"
    assert offer.command == (sys.executable, "train.py", str(owner.mark))
    assert len(offer.coordinator_digest.replace(" ", "")) == 32 and not bundle_consent.is_accepted(offer)
    assert owner.ran() == ""


@pytest.mark.parametrize(
    ("described", "missing"),
    [
        ('requires = ["no-such-package-of-ours>=2"]', "missing or too old: no-such-package-of-ours>=2"),
        (f'[run.data]\nfile = "corpus.bin"\ndigest = "sha256:{64 * "a"}"', "there is no file"),
    ],
)
def test_a_dry_run_shows_the_script_before_it_says_what_is_missing(
    owner: Owner, invitation: Invitation, described: str, missing: str
) -> None:
    owner.describe(described)
    owner.serve()
    screens: list[str] = []

    def show(job: Job, offer: BundleOffer | None) -> None:
        assert offer is not None and (offer.folder / "train.py").read_text() == SCRIPT
        screens.append(shown(offer, job)[0])

    with pytest.raises(ConfigError, match=missing):
        supervise(Job((), invitation, dry_run=True), show=show)
    (screen,) = screens
    assert "train.py" in screen and "fetched" not in screen
    with pytest.raises(ConfigError, match=missing):
        supervise(Job((), invitation), ask=lambda offer: pytest.fail("it cannot run"))


def test_files_are_private_and_restored(owner: Owner, invitation: Invitation, state: Path) -> None:
    digest = owner.serve()
    job = Job((), invitation, accept=digest)
    assert supervise(job) == 0
    folder = folder_of(state, invitation, digest)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.py")} == {0o600}
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    (folder / "train.py").write_text("raise SystemExit('altered')")
    elsewhere = owner.folder / "elsewhere"
    (folder / "helper.py").unlink()
    (folder / "helper.py").symlink_to(elsewhere)
    assert supervise(job) == 0 and owner.ran().endswith(" one")
    assert not elsewhere.exists() and not (folder / "helper.py").is_symlink()


def test_a_bundle_is_fetched_once(
    owner: Owner, invitation: Invitation, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = owner.serve()
    job = Job((), invitation, accept=digest)
    assert supervise(job) == 0
    with monkeypatch.context() as patch:
        patch.setattr(bundle_consent, "fetch_bundle", lambda *_: pytest.fail("it is cached"))
        assert supervise(job) == 0
    (folder_of(state, invitation, digest).parent / "bundle.tar").write_bytes(b"damaged")
    assert supervise(job) == 0, "fetched again"


def test_a_large_bundle_is_sent_in_blocks(owner: Owner, invitation: Invitation, state: Path) -> None:
    blob = os.urandom(3_500_000)
    (owner.folder / "weights.bin").write_bytes(blob)
    text = (owner.folder / "run.toml").read_text()
    (owner.folder / "run.toml").write_text(text.replace('"helper.py"]', '"helper.py", "weights.bin"]'))
    digest = owner.serve()
    assert supervise(Job((), invitation, accept=digest)) == 0
    assert (folder_of(state, invitation, digest) / "weights.bin").read_bytes() == blob


def test_a_bundle_that_differs_from_the_announced_one_is_refused(
    owner: Owner, invitation: Invitation, coordinator: LiveCoordinator, state: Path
) -> None:
    """It announces one digest and sends other bytes: nothing is stored."""
    owner.serve()
    bundle_server = coordinator.daemon._bundle_server
    honest = b"".join(bundle_server._blocks)
    bundle_server._blocks = [honest.replace(b"one", b"two")]
    with pytest.raises(RemoteProtocolError, match="was requested"):
        supervise(Job((), invitation), ask=lambda offer: True)
    bundle_server._blocks = [honest[:-512]]
    with pytest.raises(RemoteProtocolError, match="were announced"):
        supervise(Job((), invitation), ask=lambda offer: True)
    bundle_server._blocks = [honest, b""]
    with pytest.raises(RemoteProtocolError, match="with a block of another bundle"):
        supervise(Job((), invitation), ask=lambda offer: True)
    assert owner.ran() == "" and not list(state.rglob("train.py"))


@pytest.mark.parametrize(
    "said",
    [[], {}, {"digest": "sha256:0", "bytes": 1}, {"digest": f"sha256:{64 * 'a'}", "bytes": 1 << 30},
     {"digest": f"sha256:{64 * 'a'}", "bytes": True}, {"digest": 7, "bytes": 1}],
)  # fmt: skip
def test_an_impossible_announcement_is_refused(said: object) -> None:
    with pytest.raises(RemoteProtocolError, match="announces an invalid bundle"):
        bundle_fetch.AnnouncedBundle.from_status({"bundle": said})


def test_a_run_without_a_bundle_requires_a_command(invitation: Invitation) -> None:
    with pytest.raises(ConfigError, match="has no bundle") as caught:
        supervise(Job((), invitation))
    assert "-- python train.py" in caught.value.remedy


# -- requirements of the script ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "missing"),
    [
        ((("numpy", ""), ("numpy", "1.0"), ("NumPy", "1")), ""),
        ((("numpy", "999.1"),), "numpy>=999.1"),
        ((("no-such-package-of-ours", ""),), "no-such-package-of-ours"),
    ],
)
def test_missing_packages_are_named(requires: tuple[tuple[str, str], ...], missing: str) -> None:
    run = RunDescription(script="train.py", requires=requires, image="registry.example/x")
    if not missing:
        require_packages(run.requires, "the run's script", run.image)
        return
    with pytest.raises(ConfigError, match=f"packages that are missing or too old: {missing}") as caught:
        require_packages(run.requires, "the run's script", run.image)
    assert f"-m pip install '{missing}'" in caught.value.remedy
    assert "or use the image registry.example/x" in caught.value.remedy


def test_versions_are_compared_by_number() -> None:
    number = extras._release
    assert number("2.10.0+cpu") > number("2.9") and number("2.0") == number("2") and number("dev") == ()


def test_data_is_checked_by_its_digest(tmp_path: Path) -> None:
    files, data_dir = tmp_path / "files", tmp_path / "data"
    files.mkdir()
    (data_dir / "sets").mkdir(parents=True)
    run = RunDescription(
        script="t.py",
        data=DatasetDescription("sets/corpus.bin", digest_of(b"words"), "https://example.org/c"),
    )
    with pytest.raises(ConfigError, match="is missing") as caught:
        bundle_consent.find_data_file(run, data_dir, files)
    assert (
        "download it: https://example.org/c; then specify its folder with --data-dir" in caught.value.remedy
    )
    path = data_dir / "sets" / "corpus.bin"
    path.write_bytes(b"wards")
    with pytest.raises(ConfigError, match="but the run's data set has") as caught:
        bundle_consent.find_data_file(run, data_dir, files)
    path.write_bytes(b"words")
    assert bundle_consent.find_data_file(run, data_dir, files) == path
    assert bundle_consent.find_data_file(replace(run, data=None), data_dir, files) is None


def test_a_file_of_the_volunteer_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "data" / ("ab" * 32)
    path.parent.mkdir()
    path.write_bytes(b"the volunteer's")
    (tmp_path / "data" / "link").symlink_to(path)
    for name in (path.name, "link"):
        described = DatasetDescription(name, f"sha256:{path.name}", url="https://example.org/c", bytes=5)
        with pytest.raises(ConfigError, match="but the run's data set has"):
            bundle_consent.find_data_file(
                RunDescription(script="t.py", data=described), path.parent, tmp_path / "files"
            )
        assert path.read_bytes() == b"the volunteer's"


def test_the_script_receives_the_folder_of_the_data(
    owner: Owner, invitation: Invitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "sets").mkdir(parents=True)
    (tmp_path / "mine" / "sets" / "corpus.bin").write_bytes(b"words")
    owner.describe(f'[run.data]\nfile = "sets/corpus.bin"\ndigest = "{digest_of(b"words")}"\n')
    digest = owner.serve()
    monkeypatch.chdir(tmp_path)
    assert supervise(Job((), invitation, accept=digest, settings={"data_dir": "mine"})) == 0
    assert owner.ran() == f"{tmp_path / 'mine'} one"


# -- data that is fetched ------------------------------------------------------------------------------

WORDS = b"word %06d\n"
CORPUS = b"".join(WORDS % number for number in range(60))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "corpus.txt").write_bytes(CORPUS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(agent, "ShardCache", partial(ShardCache, retry_after_s=(0.0, 0.0)))
    server = Server(tmp_path / "served")
    yield server
    server.stop()


def described(url: str, content: bytes = CORPUS) -> str:
    return (
        f'[run.data]\nfile = "sets/corpus.txt"\ndigest = "{digest_of(content)}"\n'
        f'url = "{url}/corpus.txt"\nbytes = {len(content)}\nwhere = "words, CC-0"\n'
    )


def shown(offer: BundleOffer, job: Job) -> tuple[str, object]:
    rules = tuple("=".join(pair) for pair in job.controls)
    given = {"cache_limit": "5GB", "set": rules, "upload_limit": job.settings.get("upload_limit")}
    settings = resolve("worker", given, {}, RunFile())
    facts = consent_prompt.offer_facts(settings, job, offer)
    return "\n".join(consent_prompt.offer_lines(settings, job, offer)), facts["data_set"]


def test_an_offer_shows_the_names_of_its_files_and_the_rules_that_apply(
    owner: Owner, invitation: Invitation
) -> None:
    owner.serve()
    screens: list[str] = []

    def ask(offer: BundleOffer) -> bool:
        screens.append(shown(offer, Job((), invitation))[0])
        folder = offer.entry.identity.with_suffix("")
        folder.mkdir(exist_ok=True)
        SavedSettings(folder).save_rules({"battery": "pause", "gpu": "run"}, {})
        return False

    for _ in range(2):
        with pytest.raises(NotAccepted):
            supervise(Job((), invitation), ask=ask)
    assert all("               helper.py, run.toml, train.py: " in screen for screen in screens)
    assert "rules: none" in screens[0] and screens[1].endswith("rules: battery=pause")


def test_an_offer_shows_the_rate_limit_that_applies(owner: Owner, invitation: Invitation) -> None:
    """The limit of the command line replaces a rule that was saved before it, and not one saved after it."""
    owner.serve()
    screens: list[str] = []
    job = Job((), invitation, settings={"upload_limit": "5Mbit"})

    def ask(offer: BundleOffer) -> bool:
        folder = offer.entry.identity.with_suffix("")
        folder.mkdir()
        saved = SavedSettings(folder)
        for given in ({}, job.rules):
            saved.save_rules({"upload": "20Mbit", "download": "off"}, given)
            screens.append(shown(offer, job)[0])
        return False

    with pytest.raises(NotAccepted):
        supervise(job, ask=ask)
    assert "upload limit: 5Mbit (" in screens[0] and "upload limit: 20Mbit\n" in screens[1]
    assert all("download limit: none" in screen and "rules: none" in screen for screen in screens)


@pytest.mark.parametrize("columns", [80, 120])
def test_an_offer_is_broken_between_words_and_keeps_its_columns(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = [
        "The owner asks this machine to run a script.",
        "",
        "  digest       sha256:" + "ab" * 40,  # too long for 80 columns, and copied as a whole
        *consent_prompt._labelled("sends", consent_prompt.DISCLOSED_DATA),
    ]
    fitted = list(consent_prompt.fit_lines(lines))
    assert fitted[:3] == lines[:3]
    assert max(map(len, fitted[3:])) <= columns
    assert [line[:15].strip() for line in fitted[3:]] == ["sends", *[""] * (len(fitted) - 4)]
    assert " ".join(line[15:] for line in fitted[3:]) == " ".join(consent_prompt.DISCLOSED_DATA)


def test_data_is_fetched_once_it_is_accepted(
    owner: Owner, invitation: Invitation, server: Server, tmp_path: Path
) -> None:
    owner.describe(described(f"{server.url}/breaks"))
    owner.serve()
    lines: list[str] = []
    job = Job((), invitation, settings={"cache_limit": "5GB"})

    def ask(offer: BundleOffer) -> bool:
        text, facts = shown(offer, job)
        assert "sets/corpus.txt: 720 B will be fetched, and kept in a cache of at most 5GB" in text
        assert f"from {server.url}/breaks/corpus.txt, {digest_of(CORPUS)}\n" in text
        assert "the owner says: words, CC-0" in text and facts["bytes"] == 720
        assert not (tmp_path / "cache").exists(), "nothing is fetched before the answer"
        return True

    assert supervise(job, lines.append, ask=ask) == 0
    folder = owner.ran().split()[0]
    assert (Path(folder) / "sets" / "corpus.txt").read_bytes() == CORPUS
    assert re.fullmatch(r"fetched corpus.txt: 720 B of 720 B in \d+\.\d s", lines[2]), lines
    assert supervise(job) == 0 and owner.ran().split()[0] == folder, "from the cache"
    (tmp_path / "cache" / "gridtrain" / "shards" / digest_of(CORPUS)[7:]).write_bytes(CORPUS[::-1])
    assert supervise(job) == 0 and (Path(folder) / "sets" / "corpus.txt").read_bytes() == CORPUS
    assert [asked for _, asked in server.stop()] == ["-", "bytes=100-", "bytes=200-", "-"]


NEEDS_SPACE = """
import os, pathlib, sys
from gridtrain.errors import DataError
from gridtrain.training.data.shard_files import ShardCache

try:
    ShardCache(limit_bytes=800)._make_room(100, "another")
except DataError as error:
    path = pathlib.Path(os.environ["GRIDTRAIN_DATA_DIR"]) / "sets" / "corpus.txt"
    pathlib.Path(sys.argv[1]).write_text(f"{path.stat().st_size} {error}")
"""


def test_no_other_run_removes_the_data_while_the_script_runs(
    owner: Owner, invitation: Invitation, server: Server
) -> None:
    (owner.folder / "train.py").write_text(NEEDS_SPACE)
    owner.describe(described(f"{server.url}/plain"))
    digest = owner.serve()
    for _ in ("fetched", "from the cache"):
        assert supervise(Job((), invitation, accept=digest)) == 0
        assert re.match("720 .*in which other runs use 720 B", owner.ran())
    ShardCache(limit_bytes=800)._make_room(100, "another")
    assert not (ShardCache().folder / digest_of(CORPUS)[7:]).exists()


@pytest.mark.parametrize(
    ("fault", "limit", "words"),
    [
        ("other", "1GB", f"{digest_of(CORPUS[::-1])[7:19]}, but {digest_of(CORPUS)[7:19]}"),
        ("gone/x", "1GB", "HTTP 404"),
        ("plain", "600B", "a shard of 720 B does not fit into the cache of 600 B"),
    ],
)
def test_unusable_data_is_refused(
    fault: str, limit: str, words: str, owner: Owner, invitation: Invitation, server: Server
) -> None:
    owner.describe(described(f"{server.url}/{fault}"))
    digest = owner.serve()
    with pytest.raises(DataError, match=words):
        supervise(Job((), invitation, accept=digest, settings={"cache_limit": limit}))
    assert owner.ran() == ""


READS_ONE = """
import os, pathlib, sys, gridtrain
data = gridtrain.Shards("index.json")
pathlib.Path(sys.argv[1]).write_text(f"{os.environ['GRIDTRAIN_CACHE_LIMIT']} {data[3]} {len(data)}")
"""


def test_only_needed_files_of_an_index_are_fetched(
    owner: Owner, invitation: Invitation, server: Server, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / "served" / f"{number}.txt").write_text("".join(f"{number} {i}\n" for i in range(2)))
    index = build_index([str(tmp_path / "served" / f"{number}.txt") for number in range(3)])
    write_index(index, owner.folder / "index.json", f"{server.url}/plain")
    (owner.folder / "train.py").write_text(READS_ONE)
    owner.describe('[run.data]\nindex = "index.json"\nwhere = "numbers"\n')
    digest = owner.serve()
    job = Job((), invitation, accept=digest, settings={"cache_limit": "1GB"}, dry_run=True)
    seen: list[tuple[str, object]] = []
    assert supervise(job, show=lambda job, offer: seen.append(shown(offer, job))) == 0
    ((text, facts),) = seen
    assert "3 files, 24 B, 6 samples" in text and f"3 from {server.url}/plain\n" in text
    assert facts == {"files": 3, "bytes": 24, "samples": 6, "origins": {f"{server.url}/plain": 3}}
    assert supervise(replace(job, dry_run=False)) == 0
    assert owner.ran() == "1GB 1 1 6"
    assert server.stop() == [("/plain/1.txt", "-")]


def test_an_index_with_control_characters_is_not_shown(owner: Owner, invitation: Invitation) -> None:
    shard = {"url": "https://example.org/\x1b[2J", "samples": 1, "bytes": 1, "sha256": 64 * "a"}
    body = {"version": 1, "format": "text", "tokenizer": "", "shards": [shard]}
    (owner.folder / "index.json").write_text(json.dumps(body))
    owner.describe('[run.data]\nindex = "index.json"\n')
    owner.serve()
    with pytest.raises(ConfigError, match="must be a path or a URL"):
        supervise(Job((), invitation, dry_run=True))


def test_consents_that_cannot_be_read_are_ignored(tmp_path: Path) -> None:
    for text in ("", "{", "{}", "[1, null]", "[" * 100_000):
        (tmp_path / bundle_consent.ACCEPTED).write_text(text)
        assert bundle_consent._read_consents(tmp_path) == []
    (tmp_path / bundle_consent.ACCEPTED).write_text(json.dumps(["sha256:a"]))
    assert bundle_consent._read_consents(tmp_path) == ["sha256:a"]


def test_a_disk_that_cannot_be_written_to_is_reported(
    owner: Owner, invitation: Invitation, state: Path
) -> None:
    owner.serve()
    (state / "gridtrain" / "default").mkdir(parents=True)
    (state / "gridtrain" / "default" / "bundles").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written to") as caught:
        supervise(Job((), invitation), ask=lambda offer: True)
    assert "free space" in caught.value.remedy


def test_the_log_of_the_coordinator_has_no_violation(coordinator: LiveCoordinator) -> None:
    assert isinstance(coordinator.log, io.StringIO) and "violation" not in coordinator.log.getvalue()
