"""Pictures of every page at two widths, and what consoles complained of.

PYTHONPATH=tests python tests/site/look.py     # of build/site, into build/look
"""

import sys
from pathlib import Path

from oracles.browser import Browser, serve

ROOT = Path(__file__).parents[2]
SITE, LOOK = ROOT / "build" / "site", ROOT / "build" / "look"
WIDTHS = (1280, 390)
# Whatever reaches beyond the window and is not in a box that scrolls.
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"


def look(names=()):
    """Take the pictures; whether every page was without errors and within its window."""
    LOOK.mkdir(parents=True, exist_ok=True)
    server, fine = serve(SITE), True
    with Browser() as browser:
        for page in sorted(SITE.glob("*.html")):
            if names and page.stem not in names:
                continue
            for width in WIDTHS:
                browser.errors.clear()
                browser.open(f"http://127.0.0.1:{server.server_port}/{page.name}", width)
                browser.run("new Promise((done) => setTimeout(done, 300))")
                browser.picture(LOOK / f"{page.stem}_{width}.png")
                found = [*browser.errors]
                if (beyond := browser.run(TOO_WIDE)) > 0:
                    found.append(f"{beyond} pixels too wide")
                print(f"{page.stem} at {width}: {'; '.join(found) or 'fine'}")
                fine &= not found or page.stem == "404"
    server.shutdown()
    return fine


if __name__ == "__main__":
    sys.exit(not look(sys.argv[1:]))
