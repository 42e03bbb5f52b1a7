"""A headless Chromium, driven by the DevTools protocol over a websocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.page_picture import find_chromium

CHROMIUM = find_chromium()
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--remote-debugging-port=0", "--force-color-profile=srgb", "--font-render-hinting=none", "about:blank",
)  # fmt: skip
STARTS_S = 60.0


class Page:
    """One tab. `problems`: errors of its console, exceptions and violated policies."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._loaded = asyncio.Event()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises RuntimeError."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(30):
            answer = await future
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def listen(self) -> None:
        """Take answers and events until the tab is gone."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                if not (waiting := self._waiting.pop(data["id"])).done():
                    waiting.set_result(data)
                continue
            params = data["params"]
            if data["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", str(details)))
            elif data["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif data["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
                self.problems.append(str(params["args"]))
            elif data["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif data["method"] == "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise. Raises RuntimeError."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Wait until the expression is true; returns its value."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with suppress(RuntimeError):  # between two documents
                        if value := await self.evaluate(expression):
                            return value
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"not so: {expression}\n{self.problems}\n{text}") from None

    async def open(self, url: str) -> None:
        """Go to an address."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(30):
            await self._loaded.wait()

    async def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}.get(key, 0)
        event = {"key": key, "windowsVirtualKeyCode": code, "code": key, "text": text}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def write(self, text: str) -> None:
        """Type into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def look(self, scheme: str = "light", width: int = 1440, height: int = 1000) -> None:
        """The size of the window, and which colours the user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path, whole: bool = False) -> None:
        """Store what the window shows, or the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A fresh browser with one tab."""
    folder = tempfile.mkdtemp(prefix="relume-chromium-")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, f"--user-data-dir={folder}", *FLAGS,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            target = await _first_tab(session, Path(folder))
            async with session.ws_connect(target, max_msg_size=0, heartbeat=None) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.look()
                    yield page
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _first_tab(session: aiohttp.ClientSession, folder: Path) -> str:
    """The websocket of the browser's tab, when it is there."""
    async with asyncio.timeout(STARTS_S):
        port_file = folder / "DevToolsActivePort"
        while not (port_file.exists() and "\n" in port_file.read_text()):
            await asyncio.sleep(0.05)
        port = int(port_file.read_text().split()[0])
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                for tab in await answer.json():
                    if tab["type"] == "page":
                        return str(tab["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
