"""Headless Chromium over the DevTools protocol, for tests of pages: no driver package, one websocket.

`Browser.find()` names the program; every wait ends by an event of the protocol or by a deadline.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--hide-scrollbars",
)
DEADLINE = 60.0


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. `errors`: console errors and uncaught exceptions; `requests`: every URL that was asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            params = event.get("params", {})
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"][:200])
            elif event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.errors.append(str([item.get("value") for item in params["args"]]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = len(self._answers) + id(params) % 10**6 * 1000
        self._answers[number] = future = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, DEADLINE)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its script is through."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), DEADLINE)

    async def size(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression (promises are awaited)."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]["exception"]["description"]
        return result["result"].get("value")

    async def key(self, name: str) -> None:
        """Press and let go, as a user does: "Tab", "Enter", "ArrowRight", "a"."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "End": 35, "Home": 36}
        text = "\r" if name == "Enter" else name if len(name) == 1 else ""
        base = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, ord(name[0].upper()))}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **base)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **base)


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """A fresh browser with a fresh profile and one blank tab."""
    program = find_chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(DEADLINE):
                while not (found := re.search(rb"ws://([\d.:]+)/", line := await process.stderr.readline())):
                    assert line, "chromium ended before it listened"
            drain = asyncio.create_task(process.stderr.read())
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{found[1].decode()}/json/list") as answer:
                    target = next(item for item in await answer.json() if item["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    yield page
                    page._reader.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await page._reader
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await drain
