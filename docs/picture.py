"""The picture of the README: the top of a report, as a browser shows it.

    python docs/picture.py runs/quickstart/report.html

Needs playwright and the chromium of the system, as the tests of the page do.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1100, 1120  # the verdict and the learning curves


def main(page: str) -> None:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(Path(page).resolve().as_uri())
        tab.screenshot(path=str(Path(__file__).parent / "report.png"))
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
