"""Headless Chromium, for the tests of pages; a test that asks for it is skipped where there is none."""

import shutil
import tempfile

import pytest

FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage"""


def open_browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("there is no Chromium with a chromedriver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), "--window-size=1300,900", f"--user-data-dir={tempfile.mkdtemp()}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


class Page:
    """One page in a browser."""

    def __init__(self, driver, path, dark=False, ready="document.documentElement.dataset.ready === 'yes'"):
        self.driver = driver
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        driver.get_log("browser"), driver.get_log("performance")
        driver.get(path.as_uri())
        self.wait(ready)

    def __call__(self, script):
        """The value of an expression."""
        return self.driver.execute_script(f"return {script}")

    def wait(self, condition, seconds=20):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, 0.05).until(lambda _: self(f"Boolean({condition})"), condition)

    def set(self, id, value):
        """What a person does to a control."""
        script = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        script += "e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change'))"
        self.driver.execute_script(script, id, value)

    def texts(self, selector):
        return self(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")

    @property
    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    @property
    def requests(self):
        """Addresses on a network that were asked for."""
        import json

        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if url.startswith(("http", "ws", "ftp"))]
