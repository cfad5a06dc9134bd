"""Makes the picture of the page in the docs from a report, with Chromium (Debian's `chromium`):

lambdascale demo && python -m tests.support.page_picture demo-out/event.html docs/page.png
"""

import shutil
import sys
from pathlib import Path

WIDTH, HEIGHT = 1180, 1060


def picture(report: Path, target: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(report.absolute().as_uri())
        page.wait_for_selector("h1")
        page.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
