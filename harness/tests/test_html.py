"""The HTML report: complete in itself, and looked at in a real browser."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.html import page, pretty
from harness.tests.runs import decode, run, tree

VOID = {"meta", "br", "input", "link", "hr", "img"}


class Reader(html.parser.HTMLParser):
    """Fails on elements that do not close in order; keeps the addresses and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "data", "action", "poster", "srcset"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_else():
    document = page(run())
    reader = read(document)
    local = {"rows.jsonl", "report.csv", "report.md"}
    assert {a for a in reader.addresses if not a.startswith("#")} == local
    assert {a[1:] for a in reader.addresses if a.startswith("#")} == set(reader.ids)
    assert len(set(reader.ids)) == len(reader.ids)
    assert "default-src 'none'" in document
    assert set(re.findall(r"https?://[^\"' )]+", document)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(", document)


def test_it_says_the_same_as_the_markdown_without_any_script():
    text = read(page(run()).split("<script>")[0] + "</body></html>").text
    for words in ("PASSED", "Best tree: 2.00 [2.00, 2.00]", "no CUDA device", "SLOWER", "umbers", "hardware key"):
        assert words in text


def test_a_page_of_no_rows():
    assert "NOTHING MEASURED" in read(page([])).text


def test_names_cannot_become_markup():
    evil = '</script><script>alert(1)</script><img src="x">'
    row = decode(evil, "ddtree-b16", 0.5, trees=(tree(texts=(evil,) * 4, prompt=evil),))
    document = page([decode(evil, "ar", 1.0), row])
    assert document.count("<script>") == 1
    assert "<img" not in document
    read(document)


def test_headers_in_the_signs_of_print():
    assert [pretty(name) for name in ("GPU us", "mean tau", "x chain [95 %]", "status")] == [
        "GPU µs", "mean τ", "× chain [95 %]", "status",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> str:
    """The path of Chromium or Chrome."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")


def visit(browser: str, folder: Path, document: str, *options: str) -> tuple[str, str]:
    """(what the browser printed, what went to its console) after it opened the document and ran its scripts."""
    file = folder / "report.html"
    file.write_text(document, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()],
        capture_output=True,
        check=True,
    )
    errors = done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8"), "\n".join(line for line in errors.splitlines() if "CONSOLE" in line)


WALK = """
(() => {
  const press = (key) => document.querySelector("details.tree[open] .here")
    .dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const seen = [];
  const look = () => seen.push(document.querySelector("details.tree[open] .here").dataset.i);
  look();
  for (const way of ["Right", "Right", "Right", "Left", "Home", "Up", "Right", "Up"]) {
    press(way === "Home" ? way : `Arrow${way}`);
    look();
  }
  document.body.dataset.walk = seen.join(" ");
  document.querySelector("details.tree[open] .n[data-i='3']").dispatchEvent(new MouseEvent("click", { bubbles: true }));
  document.body.dataset.facts = document.querySelector("details.tree[open] .facts").textContent;
  const slider = document.querySelector("details.tree[open] input");
  slider.value = 1;
  slider.dispatchEvent(new Event("input"));
  const left = [...document.querySelectorAll("details.tree[open] .n:not(.late)")];
  document.body.dataset.grown = left.map((node) => node.dataset.i);
  document.querySelectorAll(".tools button")[1].click();
  document.body.dataset.second = document.querySelector("details.tree[open] summary").textContent;
})();
</script>"""


def test_the_browser_shows_plots_and_trees_and_walks_them_by_keyboard(browser, tmp_path):
    document = page(run()).replace("</script>", WALK)
    dom, console = visit(browser, tmp_path, document, "--dump-dom")
    assert console == ""
    assert dom.count('<svg class="plot"') == 7
    assert dom.count('<svg class="draft"') == 2
    said = dict(re.findall(r'data-(walk|facts|grown|second)="([^"]*)"', dom))
    assert said["walk"] == "0 2 3 -1 3 0 0 2 1"  # along the accepted path to the bonus token, back, and to a sibling
    assert said["facts"].startswith("⏎␣␣␣␣ ␣if ␣n")
    assert said["grown"] == "0,1"
    assert "round 4: 0 of 3 nodes accepted" in said["second"]


def test_a_picture_of_the_page_has_its_colours(browser, tmp_path):
    picture = tmp_path / "report.png"
    _, console = visit(browser, tmp_path, page(run()), f"--screenshot={picture}", "--window-size=1280,2400")
    assert console == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 60_000  # an empty page of this size takes 10 KB
