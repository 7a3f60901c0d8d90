"""The page in a real browser: quiet, readable, usable by keyboard and on a phone, whole on paper."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.evaluation.predictions import SitePredictions, as_parquet
from fedshift.evaluation.site_metrics import Scored
from fedshift.json_objects import write_object
from fedshift.report.collect import collect
from fedshift.report.page import write_page
from fedshift.report.report import whole_report

pytestmark = pytest.mark.slow
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--disable-gpu", "--no-sandbox", "--no-first-run", "--disable-background-networking", "--disable-sync")
PHONE = {"width": 390, "height": 844}
TARGETS = [f"hospital {name}" for name in ("north", "south", "east", "west", "centre", "coast")]

LOW_CONTRAST = """() => {
  const pixel = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const painted = (colors) => {
    pixel.clearRect(0, 0, 1, 1);
    for (const color of colors) { pixel.fillStyle = color; pixel.fillRect(0, 0, 1, 1); }
    return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let checked = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest("script")) continue;
    const grounds = [];
    for (let one = element; one; one = one.parentElement) grounds.unshift(getComputedStyle(one).backgroundColor);
    const ink = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [painted(grounds), painted([...grounds, ink])].map(luminance).sort((one, other) => one - other);
    if ((b + 0.05) / (a + 0.05) < 4.5) low.push(walker.currentNode.textContent.trim());
    checked += 1;
  }
  return {low, checked};
}"""


OPEN_ALL = "() => { for (const part of document.querySelectorAll('details')) part.open = true; }"
SMALL_TARGETS = """() => [...document.querySelectorAll("nav a, summary, button, .files a")]
  .filter((one) => one.checkVisibility() && Math.min(one.getBoundingClientRect().height, 24) < 24)
  .map((one) => one.textContent)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, writer: Callable[[Path], Callable[..., Path]]) -> str:
    """The page of two methods, six targets with long names, two seeds."""
    write = writer(tmp_path_factory.mktemp("page"))
    labels = np.array([0, 0, 1, 1])
    for method, gain in (("fedavg", 0.0), ("deepall", 2.5)):
        for number, target in enumerate(TARGETS):
            for seed in (0, 1):
                weights = [{"a": 0.2, "b": 0.8}, {"a": 0.6, "b": 0.4}]
                folder = write(method, target, seed, 60.0, 70.0 + gain + 2 * number + seed, weights=weights)
                scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]], dtype=np.float32)
                kept = SitePredictions(target, "target", np.arange(4), None, Scored(labels, scores.argmax(1), scores))
                (folder / "predictions.parquet").write_bytes(as_parquet([kept], ["cat", "<dog>"], {}))
    root = folder.parents[2]
    plan = {"methods": ["fedavg", "deepall"], "targets": TARGETS, "seeds": [0, 1]}
    write_object(root / "order.json", plan)
    return write_page(root, whole_report(collect(root))).as_uri()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page in a window; holds that nothing was complained of and nothing else was asked for."""
    pages, complaints, asked = [], [], []

    def open_page(**window: Any) -> Any:
        page = browser.new_page(**window)
        pages.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith("blob:")] == [address] * len(pages)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what the browser does in its own time."""
    for _ in range(100):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come true")


def test_every_text_has_contrast(opened: Callable[..., Any]) -> None:
    page = opened()
    page.evaluate(OPEN_ALL)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate(LOW_CONTRAST)
        assert found["low"] == [], scheme
        assert found["checked"] > 200


def test_columns_sort_by_key(opened: Callable[..., Any]) -> None:
    page = opened()
    names = page.locator("#result table").first.locator("thead th")
    page.locator("nav a").last.focus()
    for _ in range(3):  # the table as a whole, its first column, its second
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('thead th').innerText") == "average"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    for order, methods in (("descending", ["deepall", "fedavg"]), ("ascending", ["fedavg", "deepall"])):
        page.keyboard.press("Enter")
        assert [one.get_attribute("aria-sort") for one in names.all()] == [None, order, *[None] * len(TARGETS)]
        rows = page.locator("#result table").first.locator("tbody th").all_inner_texts()
        assert [text.split()[0] for text in rows] == methods
    unnamed = "[...document.querySelectorAll('button,a,summary,[role]')].filter((one) => !one.textContent.trim()"
    assert page.evaluate(f"{unnamed} && !one.ariaLabel).length") == 0


def test_phone_shows_what_matters_first(opened: Callable[..., Any]) -> None:
    page = opened(viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], "only tables and figures scroll"
    seen = page.locator("#verdict p").all()[:2]
    assert "Average over the targets" in seen[1].inner_text()
    assert all((box := one.bounding_box()) and box["y"] + box["height"] < PHONE["height"] for one in seen)
    column = page.locator("#result table").first.locator("tr > :nth-child(2)").all()
    assert column[0].inner_text() == "average"
    for cell in column:
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= PHONE["width"]


def test_a_phones_page_is_short_and_its_targets_are_not(opened: Callable[..., Any]) -> None:
    """24 px: WCAG 2.2, success criterion 2.5.8."""
    page = opened(viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollHeight") < 6000
    page.evaluate(OPEN_ALL)
    assert page.evaluate(SMALL_TARGETS) == []


def test_a_part_opens_where_its_link_is_pressed(opened: Callable[..., Any]) -> None:
    page = opened()
    assert not page.locator("#rows table").first.is_visible()
    page.locator("nav a[href='#rows']").click()
    until(lambda: page.locator("#rows table").first.is_visible())


def test_what_scrolls_says_so(opened: Callable[..., Any]) -> None:
    page = opened(viewport=PHONE)
    cue = "(box) => getComputedStyle(box.querySelector('caption'), '::after').content"
    region = page.locator("#result .scroll").first
    assert "scrolls" in region.evaluate(cue)
    region.focus()
    page.keyboard.press("ArrowRight")
    until(lambda: region.evaluate("(box) => box.scrollLeft") > 0)
    assert region.locator("tbody th").first.bounding_box()["x"] >= 0, "the method stays in view"
    page.set_viewport_size({"width": 1600, "height": 900})
    until(lambda: page.locator("#cost .scroll").first.evaluate(cue) == "none")


def test_paper_has_all_of_it(opened: Callable[..., Any]) -> None:
    width = 690  # pixels between the margins of A4
    page = opened(viewport={"width": width, "height": 900}, color_scheme="dark")
    page.emulate_media(media="print")
    cut = "[...document.querySelectorAll('table,svg')].filter((one) => one.getBoundingClientRect().right > innerWidth)"
    assert page.evaluate(f"{cut}.map((one) => one.parentElement.ariaLabel)") == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()


def test_figures_can_be_downloaded(opened: Callable[..., Any]) -> None:
    page = opened()
    figure = page.locator("#figure-accuracy-per-target")
    for name, start in (("SVG", "<svg"), ("CSV", "method,target,mean")):
        with page.expect_download() as download:
            figure.get_by_text(name, exact=True).click()
        text = Path(download.value.path()).read_text(encoding="utf-8")
        assert download.value.suggested_filename == f"accuracy-per-target.{name.lower()}"
        assert text.startswith(start)
        assert not re.search(r"var\(--", text), "its colours are its own"
