"""The page in a real browser, headless Chromium: what a viewer sees, by keyboard too, and accessible.

Marked `full`: a browser takes seconds to start. Screenshots are left in `.relume/ui-screenshots`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relume.chaos.runner import artifacts
from relume.chaos.runner.judge import judge
from relume.chaos.runner.report.run_report import run_report
from relume.chaos.runner.report.timeline import timeline
from relume.controlplane.admin.admin_server import AdminServer
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.ui.recorded_fleet import RecordedFleet
from relume.controlplane.ui.recording_server import RecordingServer
from relume.events import vocabulary as v
from tests.admin.scene import VIEWER
from tests.admin.scene import Scene as AdminScene
from tests.replay.frozen import FOLDER
from tests.runner.conftest import GOOD
from tests.ui.browser import CHROMIUM, Page, browser
from tests.ui.fleet import busy_fleet, fill, kill_one, load

CHECKOUT = Path(__file__).resolve().parents[2]
SHOTS = Path(os.environ.get("RELUME_SCREENSHOTS") or CHECKOUT / ".relume/ui-screenshots")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium; install it, or set RELUME_CHROMIUM"),
]
SHOWN = "!document.getElementById('page').hidden"


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browser() as page:
        yield page
        gone = "ERR_CONNECTION_REFUSED"  # its server ends before the page
        assert not [problem for problem in page.problems if gone not in problem]


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core."""
    script = CHECKOUT / "deploy/dev/get-axe.sh"
    found = subprocess.run([script], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip() or "no axe-core")
    return Path(found.stdout.strip()).read_text()


async def findings(page: Page, axe: str) -> list[str]:
    """What axe-core calls serious or critical, contrast included."""
    await page.evaluate(axe + "; 0")
    found = await page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(r => JSON.stringify(r.violations.map("
        "v => [v.impact, v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + n.failureSummary)])))"
    )
    grave = ("serious", "critical")
    return [f"{impact} {name}: {at}" for impact, name, at in json.loads(found) if impact in grave]


async def text(page: Page, selector: str) -> str:
    return str(await page.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''"))


async def focus(page: Page) -> str:
    """What has the focus: its id, or its text."""
    return str(await page.evaluate("document.activeElement.id || document.activeElement.innerText"))


async def signed_in(page: Page, admin: AdminServer) -> None:
    await page.open(f"{admin.url}/ui#token={VIEWER}")
    await page.until(SHOWN)
    await page.until("document.querySelectorAll('#lanes tbody th').length > 0")


async def test_a_fault_of_accessibility_would_be_found(page: Page, axe: str):
    async with AdminScene() as scene:
        await scene.worker("w0")
        await signed_in(page, scene.admin)
        assert await findings(page, axe) == []
        await page.evaluate(
            "document.getElementById('lane-search').closest('label').replaceWith(document.createElement('input'))"
        )
        await page.evaluate("document.getElementById('headline').style.color = '#bbb'")
        found = " ".join(await findings(page, axe))
        assert "label" in found and "color-contrast" in found


async def test_a_viewer_signs_in_and_out(page: Page):
    async with AdminScene() as scene:
        await scene.worker("w0")
        await page.open(f"{scene.admin.url}/ui")
        await page.until("!document.getElementById('sign-in').hidden")
        assert await focus(page) == "token" and not await page.evaluate(SHOWN)
        await page.write("not-a-token")
        await page.press("Enter", "\r")
        await page.until("document.getElementById('sign-in-error').innerText.includes('not known')")
        assert not await page.evaluate(SHOWN)
        await page.screenshot(SHOTS / "sign-in.png")
        await page.write(VIEWER)
        await page.press("Enter", "\r")
        await page.until(SHOWN)
        await page.until("document.getElementById('connection').innerText === 'Live from r0'")
        assert "The only worker serves." in await text(page, "#headline")
        assert VIEWER not in await page.evaluate(
            "document.cookie + JSON.stringify(localStorage) + location.href"
        )
        await page.evaluate("document.getElementById('sign-out').click()")
        await page.until("!document.getElementById('sign-in').hidden")
        assert await page.evaluate("sessionStorage.length") == 0
        page.problems = [p for p in page.problems if "401" not in p]


async def test_an_address_with_a_token_signs_in_and_hides_it(page: Page):
    async with AdminScene() as scene:
        await page.open(f"{scene.admin.url}/ui/#token={VIEWER}")
        await page.until(SHOWN)
        assert VIEWER not in await page.evaluate("location.href")
        assert "No worker has registered." in await page.until(
            "document.getElementById('headline').innerText"
        )
        assert not [url for url in page.requested if VIEWER in url]


async def test_a_new_operator_finds_who_died_and_why_a_stream_went_where_it_went(
    page: Page, axe: str
):
    """From the page alone: which worker died, what happened to its streams, and why."""
    async with busy_fleet() as (scene, admin):
        await signed_in(page, admin)
        await page.until("document.getElementById('headline').innerText === 'All 4 workers serve.'")
        await kill_one(scene, admin, "w1")
        await page.until("document.getElementById('headline').innerText.includes('w1 is dead')")
        await page.until(
            "document.getElementById('incident-list').innerText.includes('continued on')"
        )
        assert "w1's engine was killed" in await text(page, "#incident-list")
        assert (await text(page, "#lanes tbody tr")).startswith("w1"), "problems come first"
        await page.screenshot(SHOTS / "live-light.png")
        assert await findings(page, axe) == []
        await page.look("dark")
        await page.screenshot(SHOTS / "live-dark.png")
        assert await findings(page, axe) == []
        await page.look()
        await page.evaluate("document.querySelector('#incident-list button').click()")
        await page.until("document.querySelectorAll('.gaps .gap').length > 1")
        await page.screenshot(SHOTS / "incident.png")
        assert await findings(page, axe) == []
        stream = await page.evaluate(
            "document.querySelector('#detail-body tbody button').innerText"
        )
        await page.evaluate("document.querySelector('#detail-body tbody button').click()")
        await page.until("document.querySelectorAll('.story .candidates').length > 1")
        story = await text(page, "#detail-body")
        assert stream in story and "died (killed)" in story and "chosen" in story
        assert "not eligible" in story
        await page.screenshot(SHOTS / "why-light.png")
        assert await findings(page, axe) == []
        await page.look("dark")
        await page.screenshot(SHOTS / "why-dark.png")
        assert await findings(page, axe) == []
        assert {url.split("/")[2] for url in page.requested} == {admin.url.split("/")[2]}


async def test_everything_is_reached_by_the_keyboard(page: Page):
    async with busy_fleet() as (_, admin):
        await signed_in(page, admin)
        await page.press("Tab")
        assert await focus(page) == "Skip to the fleet"
        await page.press("Enter", "\r")
        await page.until("document.activeElement.id === 'fleet'")
        for _ in range(12):
            await page.press("Tab")
            if await focus(page) == "w0":
                break
        assert await focus(page) == "w0"
        await page.press("Enter", "\r")
        await page.until("document.getElementById('detail').open")
        assert await text(page, "#detail-title") == "Worker w0"
        await page.press("Escape")
        await page.until("!document.getElementById('detail').open")
        await page.until("document.activeElement.innerText === 'w0'")
        await page.press("/", "/")
        await page.until("document.activeElement.id === 'request-search'")
        await page.until("document.querySelector('#request-table button') !== null")
        name = await page.evaluate("document.querySelector('#request-table button').innerText")
        await page.write(name)
        await page.press("Enter", "\r")
        await page.until(f"document.getElementById('detail-title').innerText === 'Request {name}'")
        await page.until("document.querySelector('.story') !== null")


async def test_requests_and_events_are_filtered(page: Page):
    async with AdminScene() as scene:
        for name in ("w0", "w1"):
            await scene.worker(name)
        for number in range(6):
            await scene.serve_request(f"req-{number}")
        await signed_in(page, scene.admin)
        await page.until("document.querySelectorAll('#request-table tbody tr').length === 6")
        assert (await text(page, "#request-table tbody tr")).startswith("req-5"), "newest first"
        await page.evaluate("document.getElementById('request-search').focus()")
        await page.write("mine-req-3")
        await page.until("document.getElementById('request-count').innerText === '1 found'")
        assert (await text(page, "#request-table tbody tr")).startswith("req-3")
        await page.until(
            "document.getElementById('event-list').innerText.includes('request_ended')"
        )
        await page.evaluate("document.getElementById('event-types').focus()")
        await page.write("engine_died")
        await page.until("document.getElementById('event-list').innerText === 'No such event yet.'")
        scene.worker_writers["w1"].append(v.EngineDied("w1", 1, "killed"))
        await page.until(
            "document.getElementById('event-list').innerText.includes('w1:1 died (killed)')"
        )
        assert "request_ended" not in await text(page, "#event-list")
        await page.evaluate("document.getElementById('event-pause').click()")
        scene.worker_writers["w0"].append(v.EngineDied("w0", 1, "exit"))
        await page.until("document.getElementById('event-note').innerText === 'paused, 1 new'")
        assert "w0:1 died" not in await text(page, "#event-list")
        await page.evaluate("document.getElementById('event-pause').click()")
        await page.until("document.getElementById('event-list').innerText.includes('w0:1 died')")


async def test_texts_of_clients_stay_texts(page: Page):
    hostile = "x\u202e<img src=y onerror=alert(1)>\x1b[2J"
    async with AdminScene() as scene:
        await scene.worker("w0")
        await scene.serve_request(hostile)
        await signed_in(page, scene.admin)
        await page.until("document.querySelector('#request-table button') !== null")
        shown = "x\\u202e<img src=y onerror=alert(1)>\\u001b[2J"
        assert (
            await page.evaluate("document.querySelector('#request-table button').innerText")
            == shown
        )
        await page.evaluate("document.querySelector('#request-table button').click()")
        await page.until("document.querySelector('.story') !== null")
        assert await text(page, "#detail-title") == f"Request {shown}"
        assert await page.evaluate("document.querySelectorAll('img').length") == 0
        assert not await page.evaluate(r"/[\u202e\x1b]/.test(document.body.innerText)")


async def test_the_page_returns_after_the_server_was_away(page: Page):
    async with AdminScene() as scene:
        await scene.worker("w0")
        await signed_in(page, scene.admin)
        await scene.admin.__aexit__()
        await page.until(
            "document.getElementById('connection').innerText.startsWith('Not connected')"
        )
        scene.admin._events.closing = scene.admin.feed.closing = False
        await scene.admin.__aenter__()
        await scene.worker("w1")
        await page.until("document.getElementById('headline').innerText === 'All 2 workers serve.'")
        assert await text(page, "#connection") == "Live from r0"
        page.problems = [p for p in page.problems if "ERR_" not in p]


async def test_a_thousand_workers_are_shown_within_the_budget(page: Page, axe: str):
    """Every lane changes in each step. A replica's share of a core for two viewers stays within 5 %."""
    async with AdminScene(admin_tokens={}) as scene:
        await fill(scene, 1000)
        began = time.monotonic()
        await page.open(f"{scene.admin.url}/ui")
        await page.until(
            "document.getElementById('headline').innerText.includes('of 1 000 workers serve')"
        )
        assert time.monotonic() - began < 15.0
        assert await page.evaluate("document.querySelectorAll('#lanes tbody tr').length") < 60
        assert await page.evaluate("document.querySelector('#mosaic svg') !== null")
        await page.screenshot(SHOTS / "thousand-workers.png")
        assert await findings(page, axe) == []
        await page.evaluate("document.getElementById('lanes').scrollTop = 20000")
        await page.until("document.querySelector('#lanes tbody').innerText.includes('w450')")
        cost = await _cost(scene)
        assert cost < 0.05, f"{100 * cost:.1f} % of a core"
        step = 2
        load(scene, step)
        changed = time.monotonic()
        await page.evaluate("document.getElementById('lanes').scrollTop = 0")
        await page.until("document.querySelector('#lanes tbody').innerText.includes('9 %')")
        assert time.monotonic() - changed < 15.0


async def _cost(scene: AdminScene) -> float:
    """Time spent on moments per time passed, while every lane changes in each."""
    feed = scene.admin.feed
    spent, advance = 0.0, feed._advance

    def timed() -> None:
        nonlocal spent
        began = time.thread_time()
        advance()
        spent += time.thread_time() - began

    feed._advance = timed  # type: ignore[method-assign]
    began, built = time.monotonic(), feed.built
    for step in range(10, 16):
        load(scene, step)
        at = feed.built
        await scene.until(lambda at=at: feed.built > at, 30.0)
    feed._advance = advance  # type: ignore[method-assign]
    assert feed.built - built >= 6
    return spent / (time.monotonic() - began)


async def test_a_stored_log_is_stepped_through(page: Page, axe: str):
    recorded = RecordedFleet(from_file(FOLDER / "engine-killed.rlog"))
    async with RecordingServer(recorded) as server:
        await page.open(server.url)
        await page.until("document.querySelectorAll('#lanes tbody th').length === 4")
        assert "engine-killed.rlog" in await text(page, "#connection")
        assert await page.evaluate("document.getElementById('to-end').disabled")
        await page.press("[", "[")
        await page.until("!document.getElementById('to-next').disabled")
        count = await text(page, "#place-count")
        await page.press("]", "]")
        await page.until(f"document.getElementById('place-count').innerText !== {count!r}")
        await page.evaluate(
            "document.querySelector('#marks .failure').dispatchEvent(new MouseEvent('click'))"
        )
        await page.until(
            "document.getElementById('headline').innerText.includes('w0 is suspected')"
        )
        await page.until(
            "document.getElementById('event-list').innerText.includes('worker_suspected')"
        )
        await page.evaluate("document.getElementById('on-one').click()")
        await page.until("document.getElementById('headline').innerText.includes('w0 is dead')")
        assert "engine was killed" in await text(page, "#incident-list")
        await page.screenshot(SHOTS / "recording-light.png")
        assert await findings(page, axe) == []
        await page.look("dark")
        await page.screenshot(SHOTS / "recording-dark.png")
        assert await findings(page, axe) == []
        for _ in range(2):
            await page.evaluate("document.getElementById('back-one').click()")
            await page.until("!document.getElementById('headline').innerText.includes('is dead')")
        await page.until("document.getElementById('headline').innerText.startsWith('All 4')")
        assert "No failure so far." in await text(page, "#incident-list")
        moved = recorded.incidents[0].touched[0].request
        await page.evaluate(f"location.hash = 'request={moved}'")
        await page.until("document.querySelector('.story .when button') !== null")
        assert "later" in await page.evaluate(
            "getComputedStyle(document.querySelector('.later .when'), '::after').content"
        )
        await page.evaluate("document.querySelector('.later .when button').click()")
        await page.until("!document.getElementById('detail').open")
        await page.evaluate(
            "const s = document.getElementById('scale'); s.value = 0; s.dispatchEvent(new Event('input'))"
        )
        await page.until(
            "document.getElementById('place-time').innerText === 'before the first transaction'"
        )
        assert (
            await text(page, "#headline") == "No worker has registered. No request can be accepted."
        )


async def test_a_chaos_run_is_shown_above_its_log(page: Page, axe: str, tmp_path: Path):
    artifacts.keep(tmp_path, GOOD, judge(GOOD), "relume-chaos run recorded --seed 7")
    outcome, run = artifacts.outcome_in(tmp_path)
    report = run_report(timeline(outcome), judge(outcome), run)
    recorded = RecordedFleet(
        History(groups=list(outcome.groups), origin="recorded, seed 7: passed")
    )
    async with RecordingServer(recorded, report=report) as server:
        await page.open(server.url)
        await page.until("!document.getElementById('run').hidden")
        await page.look(height=1500)
        assert "passed" in await text(page, "#run-body") and "engine-kill" in await text(
            page, "#run-body"
        )
        assert await page.evaluate("document.querySelectorAll('.chart .again').length") >= 14
        assert await page.evaluate("document.querySelectorAll('.chart .point').length") == 2 * 56
        await page.screenshot(SHOTS / "chaos-run.png")
        assert await findings(page, axe) == []
        struck = report.struck[0].from_ms + 300
        place = await page.evaluate(
            "(() => { const b = document.querySelector('.chart').getBoundingClientRect();"
            f" return b.left + b.width * (90 + 1060 * {struck} / {report.ends_ms}) / 1160; }})()"
        )
        await page.evaluate(
            f"document.querySelector('.chart').dispatchEvent(new MouseEvent('click', {{clientX: {place}}}))"
        )
        await page.until("document.getElementById('headline').innerText.includes('dead')")
