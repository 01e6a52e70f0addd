# SPDX-License-Identifier: Apache-2.0
"""A real browser without a window: headless Chromium, driven over two pipes with its own protocol.

    with Browser(width=390, dark=True) as browser:
        browser.open("file:///...")
        browser.value("document.title"), browser.requests, browser.complaints

It has no network: every name resolves to nothing.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless --no-sandbox --no-first-run --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    "--disable-component-update --remote-debugging-pipe"
).split()


def installed() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, width=1280, height=900, dark=False):
        self.width, self.height, self.dark = width, height, dark
        self.requests, self.blocked = [], []  # addresses asked for; why some got no answer
        self.complaints = []  # errors and warnings of the console
        self.count, self.session, self.rest, self.loaded = 0, None, b"", False

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="browser-")
        theirs_in, self.to = os.pipe()
        self.of, theirs_out = os.pipe()

        # The last of four new descriptors is never 3, so the first redirection hides none.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *self._command()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self):
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        size = {"width": self.width, "height": self.height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def _command(self):
        return [installed(), *OPTIONS, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={self.folder}"]

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.of)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, method, **parameters):
        """The answer to a command of the protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self.count:
                assert "error" not in told, told
                return told["result"]

    def _next(self):
        while b"\0" not in self.rest:
            chunk = os.read(self.of, 1 << 16)
            assert chunk, "the browser ended"
            self.rest += chunk
        text, _, self.rest = self.rest.partition(b"\0")
        told = json.loads(text)
        about = told.get("params", {})
        match told.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Network.loadingFailed":
                self.blocked.append(about.get("blockedReason"))
            case "Log.entryAdded":
                self.complaints.append(about["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(about))
            case "Page.loadEventFired":
                self.loaded = True
        return told

    def open(self, address):
        self.loaded = False
        self.ask("Page.navigate", url=address)
        while not self.loaded:
            self._next()

    def value(self, script):
        """What a script evaluates to; the page's policy does not hold for it."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path, y=0.0, height=None):
        """A PNG of the page from y on."""
        clip = {"x": 0, "y": y, "width": self.width, "height": height or self.height, "scale": 1}
        told = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(told["data"]))
