"""Makes the dashboard's screenshots in docs/images, with a Chromium; with Pillow the files are smaller.

cd tests/common && python -m dashboard_demo.screenshots
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from dashboard_demo.chromium import LAYOUT_CHECK, LOADED, Browser
from dashboard_demo.server import DemoServer
from dashboard_demo.simulated_run import Run

IMAGES = Path(__file__).parents[3] / "docs" / "images"
VIEWS = (  # workers, shape, stages, name, width, height, dark
    (4, "butterfly", 1, "4-light", 1280, 1240, False),
    (4, "ring", 1, "4-phone", 390, 1700, False),
    (6, "ring", 3, "stages-dark", 1280, 1240, True),
    (40, "tree", 1, "40-dark", 1280, 1240, True),
    (40, "butterfly", 1, "40-phone-dark", 390, 1700, True),
    (300, "butterfly", 1, "300-light", 1280, 1240, False),
    (300, "butterfly", 1, "300-dark", 1280, 1240, True),
    (300, "butterfly", 1, "300-phone", 390, 1700, False),
)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for workers, shape, stages, name, width, height, dark in VIEWS:
            with DemoServer(
                Run(workers, shape, stages=stages, hostile=False), past=300 if workers > 40 else 700
            ) as demo:
                page = browser.page(width=width, height=height, dark=dark, mobile=width < 600)
                page.open(demo.address)
                page.until(LOADED)
                demo.advance(2)
                page.run("new Promise((drawn) => setTimeout(drawn, 700))")
                path = folder / f"dashboard-{name}.png"
                page.screenshot(path, whole=False)
                compress(path)
                print(
                    f"{path.name} {path.stat().st_size} bytes",
                    page.run(LAYOUT_CHECK),
                    page.errors,
                    flush=True,
                )


def compress(path: Path) -> None:
    """Reduce the number of colours, if Pillow is installed."""
    with contextlib.suppress(ImportError):
        from PIL import Image

        with Image.open(path) as image:
            image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
