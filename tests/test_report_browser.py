"""Pages in a real browser: a headless Chromium opens them, looks, clicks and reads."""

import pytest
from report_browser import CHROMIUM, Browser
from report_runs import figure_cells, make_cells, make_run
from report_store import make_store

from suptickets.experiments.results import write_pages
from suptickets.report import FIGURES, CellResult, Ours, experiment_page, read_runs, write_page, write_report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install Debian's package `chromium`"
)

CELLS = "method=rigl,sparsity=0.9"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
PLOTS = """[...document.querySelectorAll(".plot svg")].map((plot) => {
  const box = plot.getBoundingClientRect();
  const drawn = plot.querySelector("g").getBoundingClientRect();
  const words = [...plot.querySelectorAll("text")].filter((word) => word.getBoundingClientRect().width > 0);
  return [plot.closest("figure").id, box.width, box.height, drawn.width, words.length, box.right];
})"""
NAMES = """[...document.querySelectorAll(".plot svg text")].map((word) => [
  word.textContent.trim(),
  word.getBoundingClientRect().right - word.closest("svg").getBoundingClientRect().right,
])"""
COLUMN = """[...document.querySelectorAll("#table-settings tbody tr")]
  .map((row) => row.cells[%d].textContent)"""

UNFOLD = "for (const part of document.querySelectorAll('details')) part.open = true"
SEEN = """[...document.querySelectorAll(".plot svg")]
  .filter((plot) => plot.checkVisibility()).map((plot) => plot.closest("figure").id)"""
WORD = """(() => {
  const words = [...document.querySelectorAll("#%s svg text")];
  const word = words.find((word) => word.textContent.length > 3);
  word.scrollIntoView({ block: "center" });
  const box = word.getBoundingClientRect();
  return [word.textContent, box.left, box.right, (box.top + box.bottom) / 2];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind."""
    where = tmp_path_factory.mktemp("pages")
    make_run(where / "one" / "run", method="granet")
    make_run(where / "evil" / EVIL.replace("/", ""), layers=(EVIL, "b"), model=EVIL)
    for n, flags in enumerate(
        [{}, {"booster": "none"}, {"method": "set"}, {"method": "dense", "booster": "none"}]
    ):
        for seed in (1, 2):
            make_run(where / "several" / f"{n}-{seed}", seed=seed, **flags)
    for name in ("one", "several", "evil"):
        write_report([where / name], where / f"{name}.html")
    runs = read_runs([where / "several"])
    write_page(
        experiment_page("VGG-16", "Table 1", make_cells(0.8), runs=runs, notes=[EVIL]), where / "table.html"
    )
    make_store(where / "results", "vgg16", cells=CELLS, seeds=(1, 2), folders=True, hardware=EVIL)
    write_pages(where / "results", ["vgg16"], where / "store")
    (where / "store" / "vgg16.html").rename(where / "store.html")
    for name, figure in FIGURES.items():
        write_page(experiment_page(name, "Figure", figure_cells(name), figure=figure), where / f"{name}.html")
    return where


@pytest.mark.parametrize(("width", "dark"), SCREENS)
@pytest.mark.parametrize("name", ["one", "several", "table", "store", "evil", *FIGURES])
def test_a_page_is_quiet_whole_and_fits_the_screen(browser, pages, name, width, dark):
    browser.open(pages / f"{name}.html", width, dark=dark)
    assert browser.complaints() == []
    page, *others = browser.requests()
    assert page.startswith("file://")
    assert all(url.startswith("data:image/png;base64") for url in others)
    browser.js(UNFOLD)
    plots = browser.js(PLOTS)
    assert plots and len(browser.js(SEEN)) == len(plots)
    for name, *sizes, right in plots:
        assert all(size > 0 for size in sizes), name
        assert right <= width, name
    assert browser.js("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_colours_stay_in_their_plot(browser, tmp_path, width):
    rules = ["rule cia", "rule caa", *(f"rule cima, beta 0.{n}" for n in (1, 2, 5, 8, 9))]
    cells = [
        CellResult({"data": data, "sparsity": 0.9}, rule, "accuracy", None, Ours(0.7, 0.01, 3))
        for data in ("cifar10", "cifar100")
        for rule in rules
    ]
    page = experiment_page("a", "b", cells, figure=FIGURES["averaging"])
    (path,) = write_page(page, tmp_path / "page.html")
    browser.open(path, width)
    words = browser.js(NAMES)
    assert {word for word, _ in words} >= set(rules) and len(words) >= 14
    assert all(over <= 0 for _, over in words), words


def test_words_are_large_enough_on_a_phone(browser, pages):
    browser.open(pages / "several.html", 390)
    heights = "[...document.querySelectorAll('svg text')].map((word) => word.getBoundingClientRect().height)"
    assert min(browser.js(heights)) >= 9


def test_a_click_on_a_head_sorts_and_another_turns_the_order(browser, pages):
    browser.open(pages / "several.html")

    def column(place: int) -> list[str]:
        return browser.js(COLUMN % place)

    head = "#table-settings th:nth-child(4) button"
    before = column(3)
    browser.click(head)
    up = column(3)
    assert up == sorted(before, key=lambda text: float(text.split()[0]))
    browser.click(head)
    assert column(3) == up[::-1]
    assert browser.js("document.querySelector('#table-settings th[aria-sort]').cellIndex") == 3
    browser.click("#table-settings th:nth-child(1) button")
    assert column(0) == sorted(column(0))


def test_cells_without_a_number_come_last_both_ways(browser, pages):
    browser.open(pages / "table.html")
    column = "[...document.querySelectorAll('#table-cells tbody tr')].map((row) => row.cells[8].textContent)"
    browser.js("document.querySelector('#table-cells').closest('details').open = true")
    missing = sum(text == "\N{EN DASH}" for text in browser.js(column))
    assert missing
    for _ in range(2):
        browser.click("#table-cells th:nth-child(9) button")
        assert set(browser.js(column)[-missing:]) == {"\N{EN DASH}"}


@pytest.mark.parametrize("name", ["one", "table", "store", *FIGURES])
def test_text_in_every_plot_can_be_selected(browser, pages, name):
    browser.open(pages / f"{name}.html")
    browser.js(UNFOLD)
    for figure in browser.js("[...document.querySelectorAll('.plot')].map((plot) => plot.id)"):
        word, left, right, y = browser.js(WORD % figure)
        browser.mouse("mousePressed", left, y, 1)
        browser.mouse("mouseMoved", right + 2, y, 1)
        browser.mouse("mouseReleased", right + 2, y, 1)
        assert browser.js("getSelection().toString().trim()") == word, figure


def test_what_is_long_is_folded_until_it_is_asked_for(browser, pages):
    browser.open(pages / "store.html")
    every = browser.js("[...document.querySelectorAll('.plot')].map((plot) => plot.id)")
    seen = browser.js(SEEN)
    assert "settings-accuracy-cifar10-vgg16" in seen and "flops-training-cifar100-vgg16" in seen
    folded = [name for name in every if name not in seen]
    for kind in (
        "learning-rate",
        "train-accuracy",
        "test-accuracy",
        "layers-0",
        "layers-end",
        "reliability-0",
    ):
        assert f"{kind}-cifar10-vgg16-90" in folded
    browser.click(".folded summary")
    opened = browser.js(SEEN)
    assert {name for name in folded if "cifar10-" in name} == set(opened) - set(seen)
    tip = "#test-accuracy-cifar10-vgg16-90 [data-tip*='superposed']"
    x, y = browser.middle(tip)
    browser.mouse("mouseMoved", x, y)
    assert "superposed" in browser.js("document.querySelector('#tooltip').textContent")


SCROLL = """(() => {
  const box = document.querySelector("#table-settings").closest(".scroll");
  const first = box.querySelector("tbody td");
  const faded = getComputedStyle(box).maskImage !== "none";
  const hint = box.previousElementSibling.checkVisibility();
  const rest = box.scrollWidth - box.clientWidth;
  return [rest, faded, hint, first.getBoundingClientRect().left - box.getBoundingClientRect().left];
})()"""
FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_a_wide_table_shows_that_it_goes_on_and_keeps_its_names(browser, pages, width, dark):
    browser.open(pages / "several.html", width, dark=dark)
    browser.js(FRAME)
    rest, *signs, left = browser.js(SCROLL)
    assert rest > 100 and signs == [True, True] and left == 0
    browser.js("document.querySelector('#table-settings').closest('.scroll').scrollLeft = 1e6")
    browser.js(FRAME)
    _, faded, hint, left = browser.js(SCROLL)
    assert (faded, hint, left) == (False, True, 0)
    names = "document.elementFromPoint(...%s).closest('td, th').cellIndex"
    x, y = browser.middle("#table-settings tbody tr:last-child td")
    assert browser.js(names % f"[{max(x, 20)}, {y}]") == 0  # nothing slides over them


def test_names_do_not_break_on_a_phone(browser, tmp_path):
    make_store(tmp_path / "r", "vgg16", cells="data=cifar100,method=rigl", seeds=(1, 2))
    write_pages(tmp_path / "r", ["gains"], tmp_path)
    browser.open(tmp_path / "gains.html", 390)
    lines = """[...document.querySelectorAll("#table-gains tbody td:first-child")].map((cell) => {
      const words = document.createRange();
      words.selectNodeContents(cell);
      return words.getClientRects().length;
    })"""
    assert browser.js(lines) == [1, 1, 1]


def test_words_in_plots_have_a_halo(browser, pages):
    browser.open(pages / "one.html", 1280)
    look = "getComputedStyle(document.querySelector('.plot svg text'))"
    assert browser.js(f"[{look}.paintOrder.split(' ')[0], {look}.strokeWidth]") == ["stroke", "3px"]
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert browser.js(f"{look}.stroke === {paper}")


def test_a_table_that_fits_gives_no_hint(browser, pages):
    for width in (1280, 2000):
        browser.open(pages / "table.html", width)
        browser.js(FRAME)
        look = SCROLL.replace("#table-settings", "#table-grid-0")
        assert browser.js(look) == [0, False, False, 0]


def test_a_wide_table_uses_the_margin_of_a_wide_screen(browser, pages):
    browser.open(pages / "several.html", 2000)
    wide = "document.querySelector('%s').getBoundingClientRect().width"
    assert browser.js(wide % ".scroll:has(#table-settings)") > browser.js(wide % "header") + 20
    assert browser.js("document.documentElement.scrollWidth") == 2000


def test_points_have_tooltips(browser, pages):
    browser.open(pages / "one.html")
    x, y = browser.middle("#learning-rate [data-tip^='ticket 2']")
    browser.mouse("mouseMoved", x + 2, y + 2)
    assert browser.js("document.querySelector('#tooltip').textContent").startswith("ticket 2\n0.00")
    assert browser.js("document.querySelector('#tooltip').getBoundingClientRect().height") > 10
    browser.mouse("mouseMoved", 2, 2)
    assert browser.js("document.querySelector('#tooltip').hidden")


def test_a_hidden_point_of_a_line_shows_when_the_pointer_is_near(browser, pages):
    browser.open(pages / "one.html")
    x, y = browser.middle("#loss [data-tip^='training, epoch 5']")
    browser.mouse("mouseMoved", x, y)
    shown = "getComputedStyle(document.querySelector('#loss .near')).opacity"
    assert browser.js(shown) == "1"
    assert browser.js("document.querySelector('#loss .near').dataset.tip").startswith("training, epoch 5\n")


def test_light_and_dark_follow_the_system_and_the_button(browser, pages):
    colours = "[document.documentElement, document.querySelector('svg text')].map((e) => getComputedStyle(e))"
    look = f"(() => {{ const [page, word] = {colours}; return [page.backgroundColor, word.fill]; }})()"
    seen = []
    for dark in (False, True):
        browser.open(pages / "one.html", dark=dark)
        browser.js("localStorage.clear()")
        browser.open(pages / "one.html", dark=dark)
        seen.append(browser.js(look))
    assert seen[0] != seen[1]
    browser.click("#theme")
    assert browser.js(look) == seen[0]
    browser.open(pages / "one.html", dark=True)  # it is remembered
    assert browser.js(look) == seen[0]
    browser.click("#theme")
    assert browser.js(look) == seen[1]
    browser.js("localStorage.clear()")


@pytest.mark.parametrize("name", ["evil", "table", "store"])
def test_names_stay_text(browser, pages, name):
    browser.open(pages / f"{name}.html")
    assert EVIL in browser.js("document.body.textContent")
    assert browser.js("document.querySelectorAll('script').length") == 1
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert not [event for event in browser.events if event["method"] == "Page.javascriptDialogOpening"]


def test_the_page_lets_nothing_out(browser, pages):
    """Even if a script got in: the page's own policy refuses what it asks for."""
    browser.open(pages / "one.html")
    refused = (
        "new Promise((done) => addEventListener('securitypolicyviolation', (e) => done(e.violatedDirective)))"
    )
    sent = "fetch('https://example.com/').catch(() => 0)"
    assert browser.js(f"(() => {{ const told = {refused}; {sent}; return told; }})()") == "connect-src"


def test_the_copy_button_selects_the_command(browser, pages):
    browser.open(pages / "one.html")
    browser.click(".copy")
    assert browser.js("getSelection().toString()") == "suptickets train --method granet --seed 1"
