"""The page of ``burnish report`` in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import demand

import report_lab
from burnish.policies.cli.cli import main

QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]
WIDTHS = (1280, 390)  # a laptop and a phone
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = demand("playwright.sync_api")
    chromium = shutil.which("chromium")
    demand(chromium is not None, "there is no chromium; .ci/system_packages.sh installs it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    lab = tmp_path_factory.mktemp("lab")
    compared = report_lab.comparison(lab / "compared")
    returns = report_lab.comparison(lab / "returns", seeds=1, success=False, films=0)
    sources = {"compare": compared, "run": compared / "runs/dppo-0", "returns": returns}
    for name, folder in sources.items():
        kind = "run" if name == "run" else "compare"
        assert main(["report", f"{kind}={folder}", f"out={lab}/{name}.html"]) == 0
    other = report_lab.comparison(lab / "other", seeds=1, films=0)
    assert main(["report", f"compare={compared},{other}", f"out={lab}/pooled.html"]) == 0
    return {name: lab / f"{name}.html" for name in (*sources, "pooled")}


class Visit:
    """A page with everything that it said and asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        self.page.close()
        if error[0] is None:
            assert self.said == [], "the console stays empty"
            away = [url for url in self.asked if not url.startswith(("file:", "data:"))]
            assert away == [] and sum(url.startswith("file:") for url in self.asked) == 1


def overflow(page: Any) -> list[str]:
    """What reaches beyond the window, outside of boxes that scroll by themselves."""
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")]
            .filter((e) => !e.closest(".scroll, .symbols, svg") && e.getBoundingClientRect().right > innerWidth + 1)
            .map((e) => e.tagName + "." + e.className)"""
    )


@pytest.mark.rotating(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["compare", "run", "returns", "pooled"])
def test_it_fits_and_stays_quiet(browser, pages, tmp_path, name, width, scheme):
    with Visit(browser, pages[name], width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert overflow(page) == []
        smallest = page.evaluate(
            """() => Math.min(...[...document.querySelectorAll("text, p, td, th, li, dd, dt, code")]
                .filter((e) => e.getClientRects().length).map((e) => parseFloat(getComputedStyle(e).fontSize)))"""
        )
        assert smallest >= 12, "text keeps its size on a phone, that of drawings too"
        page.screenshot(path=str(tmp_path / "shot.png"), full_page=True)
        assert (tmp_path / "shot.png").stat().st_size > 20_000
        page.set_content(f"<p style='width:{2 * width}px'>wide</p>")
        assert overflow(page) != [], "the check must be able to fail"


def test_the_schemes_differ_and_both_can_be_read(browser, pages):
    contrast = """() => {
        const light = (text) => {
            const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
                .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = light(getComputedStyle(document.body).backgroundColor);
        return [".verdict", ".detail", ".note", ".tick", ".end", "nav a", ".missing"].map((selector) => {
            const style = getComputedStyle(document.querySelector(selector));
            const ink = light(selector === ".tick" || selector === ".end" ? style.fill : style.color);
            return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
        });
    }"""
    grounds = []
    for scheme in SCHEMES:
        with Visit(browser, pages["compare"], 1280, scheme) as page:
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert min(page.evaluate(contrast)) >= 4.5  # WCAG 2.1, level AA, for text of any size
    assert grounds[0] != grounds[1]


def until(page: Any, condition: str, seconds: float = 30.0) -> None:
    """Asked from outside: what waits inside of the page would need the right to evaluate, which its policy denies."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never became true: {condition}"
        page.wait_for_timeout(50)


def column(page: Any, table: int, index: int) -> list[str]:
    rows = page.locator("table.sortable").nth(table).locator("tbody tr")
    return [rows.nth(i).locator("th, td").nth(index).get_attribute("data-value") for i in range(rows.count())]


def test_tables_sort(browser, pages):
    with Visit(browser, pages["compare"]) as page:
        heads = page.locator("table.sortable").nth(1).locator("thead th")
        names = [text.strip() for text in heads.all_text_contents()]
        place = names.index("success")
        before = column(page, 1, place)
        heads.nth(place).locator("button").click()
        assert heads.nth(place).get_attribute("aria-sort") == "descending"
        falling = [float(x) for x in column(page, 1, place) if x]
        assert falling == sorted(falling, reverse=True) and column(page, 1, place) != before
        assert column(page, 1, place)[-1] == "", "what has no value stays below"
        heads.nth(place).locator("button").click()
        assert heads.nth(place).get_attribute("aria-sort") == "ascending"
        assert [float(x) for x in column(page, 1, place) if x] == falling[::-1] and column(page, 1, place)[-1] == ""
        heads.nth(0).locator("button").click()
        assert heads.nth(place).get_attribute("aria-sort") == "none"
        assert column(page, 1, 0) == sorted(column(page, 1, 0))


def test_curves_switch_and_are_singled_out(browser, pages):
    with Visit(browser, pages["compare"]) as page:
        steps, minutes = page.locator(".view[data-key=steps]"), page.locator(".view[data-key=minutes]")
        assert steps.is_visible() and not minutes.is_visible()
        page.get_by_label("minutes", exact=True).check(force=True)
        assert minutes.is_visible() and not steps.is_visible()
        opacity = "e => getComputedStyle(e).opacity"
        series = {name: minutes.locator(f".main-chart g[data-label={name}]") for name in ("dsrl", "dppo")}
        assert [s.evaluate(opacity) for s in series.values()] == ["1", "1"]
        page.get_by_role("button", name="dppo", exact=True).click()
        page.mouse.move(0, 0)
        assert series["dppo"].evaluate(opacity) == "1" and float(series["dsrl"].evaluate(opacity)) < 0.5


def test_films_of_a_seed_play_together(browser, pages):
    with Visit(browser, pages["compare"]) as page:
        strip = page.locator(".strip").first
        count = strip.locator("video").count()
        assert count == 6
        until(page, "[...document.querySelectorAll('video')].every((v) => v.readyState >= 2)")
        times = "[...document.querySelector('.strip').querySelectorAll('video')].map((v) => v.currentTime)"
        assert page.evaluate(times) == [0] * count, "nothing plays by itself"
        strip.locator("button.play").click()
        until(page, f"{times}.every((t) => t > 0.2)")
        assert page.evaluate("document.querySelector('.strip video').videoWidth") == 128


def test_the_scatter_tells_outcomes_by_shape_and_switches(browser, pages):
    places = "[...document.querySelectorAll('#panel-base .points use')].map((u) => u.getAttribute('x'))"
    shapes = "(id) => [...document.querySelectorAll(id + ' .points use')].map((u) => u.getAttribute('href'))"
    with Visit(browser, pages["compare"]) as page:
        base = page.evaluate(shapes, "#panel-base")
        assert len(base) == report_lab.EPISODES and base.count("#bad") == 114 and base.count("#good") == 86
        assert base == sorted(base, reverse=True), "failures are drawn last, so that none is hidden"
        shown = page.evaluate(shapes, "#panel-run").count("#bad")
        before, tally = page.evaluate(places), page.locator("#tally").text_content()
        page.select_option("#run", "dppo-1")
        assert page.evaluate(shapes, "#panel-run").count("#bad") > shown
        assert "dppo-1" in page.locator("#tally").text_content() != tally
        assert page.evaluate(places) == before, "the base does not depend on the run"
        page.select_option("#axis-x", label="tcp.y")
        assert page.evaluate(places) != before and page.evaluate(shapes, "#panel-base") == base
        page.select_option("#axis-x", label="hole.x")
        assert sorted(page.evaluate(places)) == sorted(before)


def test_a_script_in_a_name_is_text_and_could_not_run(browser, tmp_path):
    """The second half takes the escaping away: then the policy of the page still forbids the script."""
    folder = report_lab.comparison(tmp_path / "c", seeds=1, films=0, fail=False)
    data = json.loads((folder / "compare.json").read_text())
    nasty = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    report_lab.write(folder / "compare.json", {**data, "world": nasty})
    assert main(["report", f"compare={folder}"]) == 0
    with Visit(browser, folder / "report.html") as page:
        assert page.title().startswith("<script>") and page.locator("h1").text_content().startswith("<script>")
    whole = (folder / "report.html").read_text().replace("<main>", f"<main>{nasty}")
    (tmp_path / "forced.html").write_text(whole)
    visit = Visit(browser, tmp_path / "forced.html")
    assert visit.page.title() != "taken" and any("Content Security Policy" in line for line in visit.said)
    policy = whole.index('<meta http-equiv="Content-Security-Policy"')
    (tmp_path / "open.html").write_text(whole[:policy] + whole[whole.index("\n", policy) :])
    assert Visit(browser, tmp_path / "open.html").page.title() == "taken", "without the policy it would have run"
