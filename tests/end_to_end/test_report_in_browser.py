"""The report as a reader sees it, in a real Chromium: whole, quiet, and as wide as its window."""

import json
import pathlib
from collections.abc import Iterator

import pytest

from lohan.report import write_report
from support.browser import Browser, find_chromium, opened_browser
from support.run_folders import write_run_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed here"),
]

OVERLAPS = """
(() => {
  const found = [];
  for (const axis of document.querySelectorAll(".x, .y")) {
    const boxes = [...axis.querySelectorAll("span")]
      .map((span) => [span.textContent, span.getBoundingClientRect()])
      .filter(([, box]) => box.width > 0);
    boxes.forEach(([words, one], index) => boxes.slice(index + 1).forEach(([others, two]) => {
      if (one.left < two.right && two.left < one.right
          && one.top < two.bottom && two.top < one.bottom) found.push(words + " / " + others);
    }));
  }
  return found;
})()
"""
SIZES = """
[...document.querySelectorAll(".field svg, .bar, .lanes svg")].map((one) => {
  const box = one.getBoundingClientRect();
  return [one.closest("figure, section").id, box.width, box.height];
})
"""
BEYOND = """
[...document.querySelectorAll("main *, header *, nav *, footer *")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width > 0 && box.right > document.documentElement.clientWidth + 0.5
    && !one.closest(".scroll, .field");
}).map((one) => one.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_report(write_run_folder(tmp_path_factory.mktemp("run") / "out"))


@pytest.mark.parametrize("has_script", [True, False], ids=["with script", "without script"])
@pytest.mark.parametrize("width_px", [380, 768, 1400])
def test_the_page_is_quiet_and_fits_its_window(
    browser: Browser, report: pathlib.Path, width_px: int, has_script: bool
) -> None:
    page = browser.page(width_px, has_script=has_script)
    page.open(report)
    assert page.complaints() == []
    assert page.requests() == [report.resolve().as_uri()]
    assert page.value("document.documentElement.scrollWidth") <= width_px
    assert page.value(BEYOND) == []
    sizes = page.value(SIZES)
    assert len(sizes) == 11
    for anchor, width, height in sizes:
        assert width > 200, anchor
        assert height > 30, anchor
    assert page.value(OVERLAPS) == []


def test_pointing_at_a_chart_shows_its_numbers(browser: Browser, report: pathlib.Path) -> None:
    page = browser.page(1400)
    page.open(report)
    page.value('document.querySelector("#loss").scrollIntoView({block: "center"})')
    left, top, width = page.value(
        '(() => { const b = document.querySelector("#loss .field").getBoundingClientRect();'
        "return [b.left, b.top, b.width]; })()"
    )
    page.move_pointer(left + width / 2, top + 40)
    tip = page.value('document.querySelector("#loss .tip").innerText')
    assert tip.startswith("step 15")
    assert "loss: " in tip
    page.move_pointer(left + width / 2, 5)
    assert page.value('document.querySelector(".tip")') is None
    assert page.complaints() == []


def test_a_hint_at_the_edge_of_a_narrow_page_stays_inside(
    browser: Browser, report: pathlib.Path
) -> None:
    page = browser.page(380)
    page.open(report)
    page.value('document.querySelector("#busy").scrollIntoView({block: "center"})')
    left, top, width = page.value(
        '(() => { const b = document.querySelector("#busy .field").getBoundingClientRect();'
        "return [b.left, b.top, b.width]; })()"
    )
    for share in (0.01, 0.49, 0.51, 0.99):
        page.move_pointer(left + share * width, top + 40)
        box = page.value(
            '(() => { const b = document.querySelector("#busy .tip").getBoundingClientRect();'
            "return [b.left, b.right]; })()"
        )
        assert box[0] >= 0
        assert box[1] <= 380
    assert page.value("document.documentElement.scrollWidth") <= 380


def test_the_keyboard_walks_through_a_chart(browser: Browser, report: pathlib.Path) -> None:
    page = browser.page(800)
    page.open(report)
    page.value('document.querySelector("#loss .field").focus()')
    for _ in range(3):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert page.value('document.querySelector("#loss .tip").innerText').startswith("step 3")


def test_dark_and_light_follow_the_reader(browser: Browser, report: pathlib.Path) -> None:
    colours = []
    for is_dark in (False, True):
        page = browser.page(1000, is_dark=is_dark)
        page.open(report)
        colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(17, 22, 28)"]


def test_a_table_unfolds_without_a_script(browser: Browser, report: pathlib.Path) -> None:
    page = browser.page(1000, has_script=False)
    page.open(report)
    page.value('document.querySelector("#loss summary").scrollIntoView({block: "center"})')
    x, y = page.value(
        '(() => { const b = document.querySelector("#loss summary").getBoundingClientRect();'
        "return [b.left + 20, b.top + 5]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert page.value('document.querySelector("#loss table").getBoundingClientRect().height') > 100


def test_markup_in_the_files_does_nothing_in_a_browser(
    browser: Browser, tmp_path: pathlib.Path
) -> None:
    folder = write_run_folder(tmp_path / "out", num_lines=30)
    nasty = "<img src=x onerror=document.title='taken'></script><script>document.title='taken'"
    (folder / "plan.txt").write_text(nasty)
    (folder / "summary.json").write_text(json.dumps({"model": nasty}))
    page = browser.page(1000)
    page.open(write_report(folder))
    assert page.value("document.title").endswith("run report")
    assert page.complaints() == []
