"""The page in a real Chromium: it works, also with the keyboard, and no text is truncated or overlaps."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dashboard_demo import chromium
from dashboard_demo.chromium import LAYOUT_CHECK, LOADED
from dashboard_demo.simulated_run import HOSTILE, Run
from scripted_coordinator import ScriptedCoordinator

from gridtrain.core.messages import RemoveWorker
from gridtrain_coordinator.dashboard.dashboard_service import DashboardService
from gridtrain_coordinator.dashboard.listen_address import bind, parse_address, url
from gridtrain_coordinator.log import silent
from gridtrain_coordinator.status_report import RateMeter, build_status

pytest.importorskip("uvicorn", reason="no extra `coordinator` here")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(chromium.found() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.timeout(300),
]
SIZES = {
    "desktop": (1280, 900, False),
    "tablet": (820, 1100, False),
    "phone": (390, 844, True),
    "small": (320, 640, True),
}
TAB, ENTER, ESCAPE = ("Tab", 9), ("Enter", 13), ("Escape", 27)
FOCUS = (
    "document.activeElement.id || document.activeElement.textContent.trim() || document.activeElement.value"
)
AXE_AT = (
    os.environ.get("GRIDTRAIN_AXE", ""),
    str(Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"),
)
HOW = (
    "no axe-core: npm install --prefix tests/coordinator/dashboard axe-core@4.14.1, "
    "or GRIDTRAIN_AXE=path/to/axe.min.js"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.Browser() as started:
        yield started


@pytest.fixture
def stage():  # type: ignore[no-untyped-def]
    from dashboard_demo.server import DemoServer

    opened: list[DemoServer] = []

    def make(run: Run, **more: object) -> DemoServer:
        made = DemoServer(run, **more)  # type: ignore[arg-type]
        opened.append(made.__enter__())
        return made

    yield make
    for each in opened:
        each.service.close()


def drawn(page: chromium.Page) -> None:
    """Waits two frames, after which all changes are on the page."""
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def opened(browser: chromium.Browser, stage):  # type: ignore[no-untyped-def]
    def make(
        workers: int,
        size: str = "desktop",
        *,
        dark: bool = False,
        shape: str = "butterfly",
        stages: int = 1,
        state: str = "training",
    ):  # type: ignore[no-untyped-def]
        width, height, mobile = SIZES[size]
        shown = stage(Run(workers, shape, stages=stages, state=state), past=130)
        page = browser.page(width=width, height=height, dark=dark, mobile=mobile)
        page.open(shown.url)
        page.until(LOADED)
        shown.advance(2)
        drawn(page)
        return page, shown

    return make


@pytest.mark.parametrize(
    ("workers", "size", "dark"),
    [
        (4, "desktop", False),
        (4, "phone", True),
        (40, "desktop", True),
        (40, "tablet", False),
        (40, "small", False),
        (300, "desktop", False),
        (300, "desktop", True),
        (300, "phone", False),
    ],
)
def test_no_text_is_truncated_or_overlaps_and_axe_finds_no_serious_fault(
    opened, workers: int, size: str, dark: bool
) -> None:  # type: ignore[no-untyped-def]
    shape = {4: "ring", 40: "tree", 300: "butterfly"}[workers]
    page, _ = opened(workers, size, dark=dark, shape=shape)
    assert page.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    drawn(page)
    assert page.run(LAYOUT_CHECK) == []
    assert page.errors == []
    axe = next((path for path in AXE_AT if path and Path(path).exists()), None)
    if axe is None:
        pytest.skip(HOW)
    page.run(Path(axe).read_text(encoding="utf-8") + "; true")
    violations = page.run(
        "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map((each) => "
        "[each.impact, each.id, each.nodes.slice(0, 3).map((node) => node.target.join(' '))]))"
    )
    assert [each for each in violations if each[0] in ("serious", "critical")] == []


@pytest.mark.parametrize(
    ("workers", "shape", "stages"),
    [(2, "ring", 1), (3, "star", 1), (16, "butterfly", 1), (12, "ring", 4), (40, "all-gather", 1)],
)
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_other_topologies_are_drawn_without_overlaps(
    opened, workers: int, shape: str, stages: int, size: str
) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(workers, size, shape=shape, stages=stages)
    assert page.run("document.querySelectorAll('#topology .node').length") == workers
    assert page.run(LAYOUT_CHECK) == []


@pytest.mark.parametrize(
    ("state", "size", "phase", "reason", "nodes"),
    [
        ("resting", "desktop", "training", "5 workers since step ", 5),
        ("away", "phone", "paused", "all 6 members are disconnected; waiting for them to come back", 6),
        ("disk-full", "small", "paused", "the coordinator makes no decisions, because the journal ", 6),
        ("waiting", "desktop", "waiting", "waiting for 64 workers", 0),
        ("finished", "phone", "finished", "6 workers reached the end of the run", 0),
    ],
)
def test_the_page_says_why_a_run_does_not_train(
    opened, state: str, size: str, phase: str, reason: str, nodes: int
) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(6, size, shape="ring", stages=1 if state == "resting" else 3, state=state)
    assert page.run("document.getElementById('phase').textContent") == phase
    assert page.run("document.getElementById('reason').textContent").startswith(reason)
    assert page.run("document.querySelectorAll('#topology .node').length") == nodes
    waited = page.run("document.getElementById('waited').textContent")
    assert bool(waited) is (phase == "training"), waited  # a straggler is named only in training
    assert page.run(LAYOUT_CHECK) == [] and page.errors == []


def test_a_run_without_workers_says_what_it_waits_for(browser: chromium.Browser) -> None:
    bound = bind(parse_address("127.0.0.1:0"))
    service, address = DashboardService(bound, "token", silent), url(bound)
    service.start()
    try:
        core_status, at = ScriptedCoordinator(min_workers=2).core.status(0.0), {"now_s": 1.0, "uptime_s": 1.0}
        service.publish(build_status(core_status, RateMeter(), software="gridtrain", address="", **at))
        page = browser.page(width=1280, height=1240)
        page.open(address)
        page.until("document.getElementById('reason').textContent === 'waiting for 2 workers'")
        drawn(page)
        said = page.run("document.body.innerText")
        assert said.count("Waiting for the first step.") == 3, "in each plot"
        assert "none has joined yet" in said and "gridtrain invite" in said and "Earlier" not in said
        assert "when training begins" in page.run("document.getElementById('topology').textContent")
        assert page.run("getComputedStyle(document.querySelector('.uplot')).visibility") == "hidden"
        assert page.run(LAYOUT_CHECK) == [] and page.errors == []
    finally:
        service.close()


def test_stages_and_paused_workers_are_in_the_table(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(6, shape="ring", stages=3)
    assert page.run("document.getElementById('shape').textContent") == "3 stages \u00d7 2 workers"
    rows = "[...document.querySelectorAll('#body tr')].map((row) => row.cells[0].textContent)"
    assert page.run(rows)[:4] == ["0, stage 0", "1, stage 0", "2, stage 1", "3, stage 1"]
    page, _ = opened(6, state="resting")
    last = "document.querySelector('#body tr:last-child').cells"
    assert page.run(f"[{last}[0].textContent, {last}[2].textContent]") == [
        "\u2013",
        "pausedpaused by its owner: the computer is in use",
    ]


TILES = (
    "[...document.querySelectorAll('#tiles > div')]"
    ".map((tile) => tile.innerText.split('\\n').slice(1).join(' '))"
)


def test_the_page_of_an_ended_run_has_its_last_figures(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(6, shape="ring", stages=3, state="finished")
    step, loss, samples, workers, *_ = page.run(TILES)
    assert step.endswith(" a second on average") and samples.endswith(" on average"), (step, samples)
    assert workers == "0 present, 6 have left"
    assert page.run("document.getElementById('count').textContent") == "0 present, 6 have left"
    curve = page.run("document.querySelector('#plots figcaption .muted').textContent")
    assert loss.endswith(" the last that was reported") and curve == f"loss {loss.split()[0]}"
    rows = page.run(
        "[...document.querySelectorAll('#body tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert {row[5] for row in rows} == {step.split()[0]}, "all have reached the last step"
    assert all(re.fullmatch(r"left \d\d:\d\d:\d\d", row[9]) for row in rows), rows[0]
    events = page.run("[...document.querySelectorAll('#events span')].map((each) => each.textContent)")
    assert events[0] == "fatima has left: its run is finished"
    assert "the run has finished: 6 workers reached the end of the run" in events
    assert page.run("document.getElementById('topology').checkVisibility()") is False
    ends = (
        "['.t-band', '.t-change', '.t-axis'].map((kind) => {"
        " const box = [...document.querySelectorAll(`#timeline > svg > ${kind}`)].at(-1).getBBox();"
        " return Math.round(box.x + box.width); })"
    )
    band, finished, axis = page.run(ends)
    assert finished - 3 < band <= finished <= axis + 3, "the generation and the time line end with the run"
    assert finished > axis - 3


def test_a_paused_run_has_its_mean_rate_and_the_last_loss(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(6, shape="ring", state="waiting")
    step, loss, samples, workers, *_ = page.run(TILES)
    assert step.endswith(" a second on average") and samples.startswith("\u2013 ")
    assert samples.endswith(" on average") and loss.endswith(" the last that was reported")
    assert workers == "0 of 6: 3 admitted, 3 joining"


def test_a_member_that_is_not_connected_is_drawn_in_the_topology(opened) -> None:  # type: ignore[no-untyped-def]
    page, shown = opened(6, shape="ring")
    _, status, _ = next(shown._statuses)
    status["members"] = [member for member in status["members"] if member["rank"] != 2]
    shown.service.publish(status)
    page.until("document.getElementById('topology').textContent.includes('not connected')")
    assert page.run("document.querySelectorAll('#topology .node').length") == 6 and page.errors == []
    assert page.run("document.getElementById('count').textContent") == "5 present, 1 has left"


def test_a_refused_worker_is_shown_with_the_reason(opened) -> None:  # type: ignore[no-untyped-def]
    page, shown = opened(6, shape="ring")
    _, status, _ = next(shown._statuses)
    newcomer = {**status["members"][0], "rank": None, "name": "gerd", "peer": "7" * 64, "state": "joining"}
    shown.service.publish({**status, "members": [*status["members"], newcomer]})
    page.until("document.getElementById('count').textContent === '7'")
    shown.service.note("warning", "refused", {"name": "gerd", "reason": "its data differs"})
    shown.service.publish(status)
    page.until("document.getElementById('count').textContent === '6 present, 1 was refused'")
    row = "[...document.querySelectorAll('#body tr')].find((row) => row.textContent.includes('gerd'))"
    assert page.run(f"{row}.cells[2].textContent") == "refusedits data differs"
    assert page.run(f"{row}.querySelector('.badge').className") == "badge lost" and page.errors == []


@pytest.mark.parametrize(("state", "stages"), [("training", 1), ("training", 3), ("away", 1), ("resting", 1)])
def test_the_table_fits_into_a_wide_window(opened, state: str, stages: int) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(6, shape="ring", stages=stages, state=state)
    heads = (
        "[...document.querySelectorAll('#head th')].filter((head) => head.checkVisibility())"
        ".map((head) => head.innerText)"
    )
    # One worker has a violation, and none has missed a step.
    assert page.run(heads)[-2:] == ["Heard", "Violations"]
    place = "document.getElementById('table').parentElement"
    assert page.run(f"{place}.scrollWidth - {place}.clientWidth") == 0


def test_the_layout_check_finds_faults(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(4)
    assert page.run(LAYOUT_CHECK) == []
    page.run("document.querySelector('#tiles dd').style.marginTop = '-20px'")
    assert any("overlap" in each for each in page.run(LAYOUT_CHECK))
    page.run("document.querySelector('#tiles dd').style.marginTop = ''")
    page.run("document.querySelector('#tiles dd').textContent = '123,456,789,012,345'")
    assert any("leaves its box" in each for each in page.run(LAYOUT_CHECK))
    page.run("document.getElementById('reason').style.width = '3000px'")
    assert any("the window" in each for each in page.run(LAYOUT_CHECK))


def test_the_page_updates_itself(opened) -> None:  # type: ignore[no-untyped-def]
    page, shown = opened(4)
    step = page.run("document.querySelector('#tiles dd').textContent")
    points = "document.querySelectorAll('#plots canvas').length"
    assert page.run(points) == 3
    shown.advance(5)
    page.until(f"document.querySelector('#tiles dd').textContent !== {step!r}", 10.0)
    shown.service.note("warning", "lost", {"name": "anna", "reason": "silent for 10.0 s"})
    shown.advance()
    page.until(
        "document.querySelector('#events li').textContent.includes('anna is lost: silent for 10.0 s')", 10.0
    )
    assert page.errors == []


def test_times_before_today_have_a_date(opened, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    yesterday_s = time.time() - 86400.0
    monkeypatch.setattr("dashboard_demo.server.time", SimpleNamespace(time=lambda: yesterday_s))
    page, _ = opened(4, "small")
    first = page.run("[...document.querySelectorAll('#events time')].at(-1).textContent")
    assert re.fullmatch(r"\d+ [A-Z][a-z]+ \d\d:\d\d:\d\d", first)
    assert f"since {first}" in page.run("document.querySelector('#timeline svg').getAttribute('aria-label')")
    source = page.run("document.querySelector('script[type=module]').src").replace("app.js", "format.js")
    now = page.run(f"import('{source}').then((format) => format.moment(Date.now() / 1000))")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", now)
    assert page.run(LAYOUT_CHECK) == []


def test_curves_are_drawn_for_every_window_and_axis(opened) -> None:  # type: ignore[no-untyped-def]
    page, shown = opened(4)
    for window in ("recent", "whole"):
        for against in ("bytes", "step", "time"):
            page.run(f"document.querySelector('input[value={window}]').click()")
            page.run(f"document.querySelector('input[value={against}]').click()")
            shown.advance()
            drawn(page)
            labels = page.run(
                "[...document.querySelectorAll('#plots .canvas')].map((each) => each.ariaLabel)"
            )
            assert all(f"against {against}: " in label and "\u2013" not in label for label in labels), labels
    assert page.run(LAYOUT_CHECK) == [] and page.errors == []


def test_the_keyboard_reaches_everything(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(60)
    page.press(*TAB)
    assert page.run(FOCUS) == "Skip to the workers"
    page.press(*ENTER, text="\r")
    assert page.run(FOCUS) == "workers"
    seen = []
    while len(seen) < 40 and (not seen or seen[-1] != "anna"):
        page.press(*TAB)
        seen.append(page.run(FOCUS))
        assert page.run("document.activeElement.matches(':focus-visible')"), seen[-1]
    assert seen[0] == "find" and {"state", "Rank", "Step time", "anna"} <= set(seen), seen
    page.press(*ENTER, text="\r")
    assert page.until("document.getElementById('details').open")
    assert page.run("document.getElementById('details').contains(document.activeElement)")
    page.press(*ESCAPE)
    assert page.until("!document.getElementById('details').open")
    assert page.run(FOCUS) == "anna"  # the focus returns


def test_the_table_sorts_filters_and_pages(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(60)
    names = "[...document.querySelectorAll('#body .name')].map((each) => each.textContent)"
    assert len(page.run(names)) == 50
    page.run("document.getElementById('later').click()")
    assert (
        len(page.run(names)) == 10
        and page.run("document.getElementById('page').textContent") == "51 to 60 of 60"
    )
    page.run("document.querySelector('th[data-key=name] button').click()")
    assert page.run("document.querySelector('th[data-key=name]').ariaSort") == "ascending"
    page.run("document.getElementById('earlier').click()")
    assert page.run(names)[1:4] == ["anna", "anna-2", "anna-3"]
    page.run(
        "find = document.getElementById('find'); find.value = 'ANNA-2';find.dispatchEvent(new Event('input'))"
    )
    assert page.run(names) == ["anna-2"]
    page.run("find.value = 'nobody'; find.dispatchEvent(new Event('input'))")
    assert page.run("document.getElementById('page').textContent") == "no such worker"


def test_a_hostile_name_is_shown_as_text(opened) -> None:  # type: ignore[no-untyped-def]
    page, shown = opened(4)
    shown.service.note(
        "warning", "violation", {"peer": HOSTILE, "reason": "</script><script>window.hurt = 1</script>"}
    )
    shown.advance(2)
    page.until("document.querySelector('#events').textContent.includes('window.hurt')", 10.0)
    assert page.run("[document.querySelectorAll('main img, main script').length, typeof window.hurt]") == [
        0,
        "undefined",
    ]
    assert page.run("[...document.querySelectorAll('#body .name')][2].textContent").startswith("<img src=x")
    with pytest.raises(RuntimeError, match="TrustedHTML"):  # the page could not make markup if it wanted to
        page.run("document.body.innerHTML = '<b>x</b>'")
    page.errors.clear()


def test_the_token_is_removed_from_the_address_and_permits_commands(opened) -> None:  # type: ignore[no-untyped-def]
    page, shown = opened(4)
    assert "#token=" in shown.url and page.run("location.href") == shown.address
    page.run(
        "[...document.querySelectorAll('#body .name')].find((each) => each.textContent === 'bert').click()"
    )
    page.until("document.querySelector('#details .facts').textContent.includes('192.0.2.1')", 10.0)
    kick = "[...document.querySelectorAll('#details button.danger')][0]"
    page.run(f"document.getElementById('d-reason').value = 'too slow'; {kick}.click()")
    assert page.run(f"{kick}.textContent") == "Really kick?" and shown.orders == []
    page.run(f"{kick}.click()")

    def answer_shown() -> bool:
        shown.advance()
        return bool(
            page.run("document.querySelector('#details [role=status]').textContent.includes('simulated')")
        )

    chromium.until(answer_shown, "the answer", 10.0)
    facts = "document.querySelector('#details .facts').textContent"
    before = page.run(facts)

    def has_changed() -> bool:
        shown.advance()
        return bool(page.run(facts) != before)

    chromium.until(has_changed, "newer figures in the open dialog", 10.0)
    (order,) = shown.orders
    assert isinstance(order, RemoveWorker) and (order.ban, order.reason) == (False, "too slow")
    assert page.run(LAYOUT_CHECK) == []


def test_no_command_is_offered_without_the_token(browser: chromium.Browser, stage) -> None:  # type: ignore[no-untyped-def]
    shown = stage(Run(4), past=30)
    page = browser.page()
    page.open(shown.address)
    page.until(LOADED)
    page.run("document.querySelector('#body .name').click()")
    assert page.run("document.querySelectorAll('#details button.danger').length") == 0
    assert "shown with the token" in page.run("document.getElementById('details').textContent")


def test_the_switch_changes_the_theme(opened) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(4)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    seen = []
    for _ in range(3):
        page.run("document.getElementById('theme').click()")
        seen.append((page.run("document.getElementById('theme').textContent"), page.run(colour) == light))
    assert seen == [("Theme: light", True), ("Theme: dark", False), ("Theme: system", True)]


def test_a_reload_keeps_the_curves_and_old_values_are_grey_until_the_restart(
    browser: chromium.Browser, stage
) -> None:  # type: ignore[no-untyped-def]
    shown = stage(Run(4), past=400)
    page = browser.page()
    page.open(shown.address)
    page.until(LOADED)
    page.open(shown.address)
    page.until(LOADED)
    assert page.run("fetch('api/v1/history').then((a) => a.json()).then((h) => h.points.length)") > 400
    shown.service.close()
    page.until("document.getElementById('live').textContent.includes('no connection')", 20.0)
    age = "document.getElementById('age')"
    page.until(f"/^values are \\d+ s old$/.test({age}.textContent) && !{age}.hidden", 20.0)
    shown_as = f"[getComputedStyle(document.querySelector('main')).filter, {age}.hidden]"
    assert page.run(shown_as) == ["grayscale(1)", False] and page.run(LAYOUT_CHECK) == []
    stage(Run(4), past=10, listen=shown.address.removeprefix("http://").rstrip("/"))
    page.until("document.getElementById('live').textContent === 'live'", 30.0)
    assert page.run(shown_as) == ["none", True]


def test_the_page_loads_from_its_own_address_only_and_is_below_300_kB(
    browser: chromium.Browser, stage
) -> None:  # type: ignore[no-untyped-def]
    shown = stage(Run(4), past=30)
    page = browser.page()
    page.open(shown.address)
    page.until(LOADED)
    assert page.requests and all(each.startswith(shown.address) for each in page.requests)
    assert 50_000 < page.received_bytes < 300_000
