"""The page in Chromium, on a real cluster: what people see, by keyboard, in light and dark, narrow
and wide, and without any fault that axe finds. Needs Chromium (Debian's `chromium`)."""

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.cli.report import of_event, write
from services.local.demo_model import make_checkpoint
from shared import subjects
from shared.messages.scaling import ScaleAccepted, SetInstances
from tests.support.cluster import MODEL, Running, running
from tests.support.models import TINY

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
AXE = (resources.files(axe) / "axe.min.js").read_text()
VIEWS = ("cluster", "events", "event/last", f"scaling/{MODEL}", "latency", "pool", "playground")
WAIT_MS = 60_000
FAULTS = "axe.run().then(found => found.violations.map(v => `${v.id}: ${v.nodes[0].html}`))"

DRAWN_ANEW = """new Promise(drawn => {
    const canvas = document.querySelector("canvas"), before = canvas.draw;
    const look = () => canvas.draw === before ? requestAnimationFrame(look) : drawn();
    dispatchEvent(new HashChangeEvent("hashchange"));
    look();
})"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


async def opened(browser: Any, width: int, scheme: str, said: list[str]) -> Any:
    """A page; what its console says goes to `said`, violations of its policy included."""
    page = await browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    return page


async def scaled(up: Running) -> None:
    await up.bus.request(
        subjects.PLANNER_SCALE, SetInstances(name=MODEL, instances=3), ScaleAccepted, timeout=30.0
    )
    await up.replicas(3)


async def check_looks(page: Any, url: str) -> None:
    """Every view has its heading, nothing wider than the window, and no fault that axe finds."""
    for view in VIEWS:
        await page.goto(f"{url}/#{view}")
        await page.wait_for_selector("#state.live")
        await page.wait_for_selector("main h1")
        wide, room = await page.evaluate("[document.body.scrollWidth, window.innerWidth]")
        assert wide <= room, view
        await page.evaluate(AXE)
        assert await page.evaluate(FAULTS) == [], view


async def drawn(page: Any) -> int:
    """How many dots of the picture of the blocks are blue, as only blocks are."""
    script = """canvas => {
        const dots = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return dots.filter((blue, at) => at % 4 === 2 && blue - dots[at - 2] > 60).length;
    }"""
    count: int = await page.locator("canvas").first.evaluate(script)
    return count


async def check_event(page: Any, blocks: int) -> None:
    """Every block of both new copies is there, also for who uses only the keyboard."""
    assert await drawn(page) > 2 * blocks
    await page.locator("details", has_text="Arrivals").first.evaluate("found => found.open = true")
    rows = page.locator("table", has=page.get_by_text("Arrivals", exact=True)).locator("tbody tr")
    assert await rows.count() == 2 * blocks
    picture = page.locator("canvas").first
    await picture.focus()
    await page.keyboard.press("ArrowRight")
    said = page.locator("output").first
    assert "first byte at" in await said.inner_text()
    await page.evaluate(DRAWN_ANEW)
    assert "first byte at" in await said.inner_text()


async def check_comparison(page: Any, url: str) -> None:
    """Two events in one range of time: what served on when the shorter one was over is drawn on."""
    event = """{
        from: 0, to: 1, nodes: ["a", "b"], record: {sources: ["a"], targets: ["b"]}, served: [
        {kind: "path", stages: [["b", 0, 1], ["a", 1, 2]], began: 0.2, ended: 3.0},
        {kind: "replica", stages: [["b", 0, 2]], began: 0.5, ended: null}]}"""
    roles = f"import('/page/eventdata.js').then(found => [...found.rolesOf({event})])"
    assert await page.evaluate(roles) == [
        ["a", [[0.2, 3.0, "path"], [-math.inf, math.inf, "replica"]]],
        ["b", [[0.2, 3.0, "path"], [0.5, math.inf, "replica"]]],
    ]
    await page.goto(f"{url}/#events")
    boxes = page.locator("tbody input")
    await boxes.nth(1).wait_for()
    for at in range(2):
        await boxes.nth(at).check()
    await page.get_by_role("button", name="Compare").click()
    await page.get_by_role("heading", name="Two events").wait_for()
    await page.locator("canvas").nth(2).wait_for()  # a picture of each, and where the time went
    await page.evaluate(AXE)
    assert await page.evaluate(FAULTS) == []


async def check_playground(page: Any, url: str) -> None:
    await page.goto(f"{url}/#playground")
    await page.get_by_label("Prompt").fill("Hello")
    await page.get_by_role("button", name="Ask").press("Enter")
    await page.get_by_text("done", exact=True).wait_for()
    legs = page.locator("table", has=page.get_by_text("Over which nodes")).locator("tbody tr")
    assert "node-" in await legs.first.inner_text()


async def check_many_nodes(browser: Any, url: str, said: list[str]) -> None:
    """What the gateway says, with each of its nodes 334 times."""

    async def answer(route: Any) -> None:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/cluster") as response:
            first = await response.content.readuntil(b"\n\n")
        change = json.loads(first.removeprefix(b"data: "))
        nodes = change["put"]["nodes"].items()
        change["put"]["nodes"] = {f"{name}-{n}": node for name, node in nodes for n in range(334)}
        told = f"data: {json.dumps(change)}\n\n"
        await route.fulfill(body=told, content_type="text/event-stream")

    for width, scheme in ((400, "dark"), (2000, "light")):
        page = await opened(browser, width, scheme, said)
        await page.route("**/cluster", answer)
        await page.goto(f"{url}/#cluster")
        await page.get_by_role("img", name="1,002 nodes").wait_for()
        await page.get_by_text("and 902 more").wait_for()
        wide, room = await page.evaluate("[document.body.scrollWidth, window.innerWidth]")
        assert wide <= room
        await page.evaluate(AXE)
        assert await page.evaluate(FAULTS) == []
        await page.get_by_label("Only nodes with").fill("node-2-333")
        await page.get_by_text("and 902 more").wait_for(state="detached")
        table = page.locator("table", has=page.get_by_text("Nodes", exact=True))
        assert await table.locator("tbody tr").count() == 1
        await page.close()


async def test_what_people_see(tmp_path: Path, checkpoint: Path) -> None:
    said: list[str] = []
    async with (
        running(tmp_path / "cluster", checkpoint, nodes=3) as up,
        chromium() as browser,
    ):
        early = await opened(browser, 1280, "light", said)
        await early.goto(f"{up.url}/")
        await early.get_by_role("row", name="node-2").first.wait_for()
        await scaled(up)
        await early.get_by_text("3 granted").wait_for()
        late = await opened(browser, 400, "dark", said)
        await asyncio.gather(check_looks(early, up.url), check_looks(late, up.url))
        for page in (early, late):
            await page.goto(f"{up.url}/#event/last")
            await page.get_by_role("heading", name="2 copies of").wait_for()
            await check_event(page, up.record.n_blocks)
        await check_comparison(early, up.url)
        await check_playground(early, up.url)
        await check_many_nodes(browser, up.url, said)
        write(tmp_path / "event.html", *await of_event(up.bus, "last"))
        alone = await opened(browser, 1280, "light", said)
        await alone.context.set_offline(True)
        await alone.goto(f"file://{tmp_path}/event.html")
        await alone.get_by_role("heading", name="2 copies of").wait_for()
        await check_event(alone, up.record.n_blocks)
        await alone.evaluate(AXE)
        assert await alone.evaluate(FAULTS) == []
    assert said == []


async def test_a_group_is_shown_as_such(tmp_path: Path) -> None:
    said: list[str] = []
    make_checkpoint(tmp_path / "large", replace(TINY, layers=14))
    settings = {"LAMBDASCALE_NODE_ARENA_BYTES": "1200000"}  # a little more than half of the model
    async with (
        running(
            tmp_path / "cluster", tmp_path / "large", nodes=3, blocks=16, settings=settings
        ) as up,
        chromium() as browser,
    ):
        page = await opened(browser, 1280, "light", said)
        await page.goto(f"{up.url}/")
        await page.get_by_text("serves in a group").nth(1).wait_for()
        row = page.locator("table", has=page.get_by_text("Instances")).locator("tbody tr").first
        cells = await row.locator("td, th").all_inner_texts()
        nodes = sorted(stage.node for stage in up.watch.replicas[0].stages)
        assert "group" in cells
        assert all(node in cells[-1] for node in nodes)
        figures = await page.locator("main").inner_text()
        assert "serves in paths" not in figures
        await page.goto(f"{up.url}/#event/last")
        await page.get_by_role("heading", name="1 copy of").wait_for()
        assert "over 2 nodes" in await page.locator("main h1").first.inner_text()
        await page.evaluate(AXE)
        assert await page.evaluate(FAULTS) == []
    assert said == []
