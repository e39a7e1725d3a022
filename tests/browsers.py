"""The browser that looks at reports and pages, where the machine has one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextmanager
def running_browser() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS.split(), timeout=120_000)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, size: tuple[int, int], **options: Any) -> Iterator[Any]:
    """A page of this size. An error on its console, an uncaught one or a request that leaves the disk fails."""
    troubles: list[str] = []
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **options)
    page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or troubles.append(f"request: {r.url}"))
    page.set_default_timeout(120_000)  # a busy machine is slow, not wrong
    page.goto(address)
    yield page
    page.close()
    assert troubles == []
