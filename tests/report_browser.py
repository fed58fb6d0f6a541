"""A headless Chromium, driven through pipes with its DevTools protocol: nothing but the standard library."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "hide-scrollbars")
# Chromium reads commands from file 3 and writes answers to file 4.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
MIDDLE = """(() => {
  const element = document.querySelector(%s);
  element.scrollIntoView({ block: "center" });
  const box = element.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""


class Browser:
    """One page; what it says to the console and asks of the network is kept."""

    def __init__(self, profile: Path) -> None:
        commands, self.to = os.pipe()
        self.back, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        launch = [sys.executable, "-c", LAUNCH, *map(str, ends), CHROMIUM, *(f"--{flag}" for flag in FLAGS)]
        launch += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(launch, pass_fds=ends, **quiet)
        for end in (*ends, commands, answers):
            os.close(end)
        self.buffer, self.count, self.events, self.session = b"", 0, [], None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, seconds: float = 60):
        while b"\0" not in self.buffer:
            assert select.select([self.back], [], [], seconds)[0], "Chromium does not answer"
            read = os.read(self.back, 1 << 20)
            assert read, "Chromium is gone"
            self.buffer += read
        message, _, self.buffer = self.buffer.partition(b"\0")
        decoded = json.loads(message)
        if "method" in decoded:
            self.events.append(decoded)
        return decoded

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file as a screen of that size would."""
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def js(self, expression: str):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float]:
        """Of the first such element, after scrolling to it."""
        x, y = self.js(MIDDLE % json.dumps(selector))
        return x, y

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        button = "left" if clicks else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)

    def click(self, selector: str, times: int = 1) -> None:
        """As a person does, with the mouse."""
        x, y = self.middle(selector)
        self.mouse("mouseMoved", x, y)
        for clicks in range(1, times + 1):
            self.mouse("mousePressed", x, y, clicks)
            self.mouse("mouseReleased", x, y, clicks)

    def complaints(self) -> list:
        """Errors, and all that the page wrote to the console."""
        self.js("1")
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Everything that was asked for."""
        sent = (event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in sent]

    def screenshot(self, path: Path) -> None:
        """The whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close")
        for end in (self.to, self.back):
            os.close(end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
