# SPDX-License-Identifier: Apache-2.0
"""The HTML report and JUnit XML: what they say, what they escape, and the page as a real browser shows it."""

import math
import random
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import Browser, installed

from mla_oracle.cases.recipes import parse_id
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.suites import Outcome, Report, run_suite
from mla_oracle.suites.heatmap import paint
from mla_oracle.suites.junit import junit
from mla_oracle.suites.page import page, shared_start

SIZES = "heads=3,row=20,value=12,scale=0.3"
IDS = [
    str(parse_id(case_id))
    for case_id in (
        f"paged:{SIZES},lens=9+5,block=4",
        f"paged:{SIZES},lens=5+0+1+11+8+2,tokens=3,block=4,unread=numbers",
    )
]
needs_browser = pytest.mark.skipif(
    installed() is None, reason="needs Chromium, as of Debian's package chromium-headless-shell"
)


def unmasked(case):
    mutant = find("causal.none")
    results = expected(case, precision="f64") if mutant.applies(case) else mutant.run(case)
    return {name: results[name].astype(np.float32) for name in ("out", "lse")}


def large():
    """A report of 128 heads by 70 requests, of a crash, and of a pass."""
    draw = random.Random(5)
    cube = [[[10 ** draw.uniform(-1, 5) for _ in range(128)] for _ in range(2)] for _ in range(70)]
    lens = tuple(draw.randrange(2, 100_000) for _ in range(70))
    head = "paged:geometry=deepseek-v3,dtype=bf16,"
    return Report(
        [
            Outcome(f"{head}lens=8", "pass", "within the budget"),
            Outcome(
                f"{head}lens=9", "fail", "out is wrong", suspected="no causal bound", lens=lens, errors={"out": cube}
            ),
            Outcome(f"{head}lens=10", "crash", "ended by SIGABRT", stderr="a" * 300 + "\nassertion < failed"),
        ],
        "suspected over all cases: no causal bound",
    )


class Seen(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_needs_no_network_and_shows_heat_maps():
    text = page(run_suite(IDS, unmasked))
    seen = Seen(text)
    assert "script" not in seen.tags and "http" not in text.replace("http-equiv", "")
    assert all(link.startswith(("#", "data:")) for link in seen.links)
    assert seen.tags.count("figure") == 7  # the legend; out and lse over requests, query tokens and positions
    assert "head 2, request 3 (11 keys)" in text
    assert "head 2, position 9 of request 3 (11 keys), query 1: " in text


def test_what_did_not_pass_comes_first_and_what_ids_share_is_said_once():
    text = page(run_suite(IDS, unmasked))
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    assert re.findall(r'<td class="(\w+)">', body) == ["fail", "pass"]
    assert "heads=3" not in body and "lens=9+5" in body.replace("<wbr>", "")
    assert shared_start(["paged:heads=3,lens=5", "paged:heads=3,lens=55"]) == "paged:heads=3,"
    assert shared_start(["a,b", "a,c"]) == shared_start(["paged:heads=3,lens=5"]) == shared_start([]) == ""


def test_a_number_and_what_no_number_measures_have_their_colours():
    assert paint(0) == 'fill="currentColor" fill-opacity="0.07"'
    assert paint(1) == 'fill="currentColor" fill-opacity="0.22"'
    assert paint(1.001).startswith('fill="rgb(255,') and paint(1e9) == paint(1e4) == 'fill="rgb(210,0,45)"'
    assert paint(math.inf) == paint(math.nan) == 'fill="#8a3ffc"'


def test_the_worst_of_a_cell_is_what_no_number_measures():
    cube = [[[1.0, math.nan]], [[5.0, 0.0]]]
    text = page(Report([Outcome("a", "fail", "wrong", errors={"out": cube})]))
    assert "out: heads by requests, worst: beyond any number" in text
    assert "head 1, request 0: beyond any number" in text


def test_reports_escape_what_cases_and_kernels_say():
    nasty = Outcome(
        '<b>&"', "fail", "a < b & \x01c", summary="<script>", facts=("</li>",), errors={"out": [[[math.inf]]]}
    )
    loud = Outcome("<b>", "crash", "<b>", stderr="</pre><script>\x02]]>")
    text = page(Report([nasty, loud]))
    assert "<script>" not in text and "<b>" not in text
    tree = ET.fromstring(junit(Report([nasty, loud])))
    assert tree[0][0].get("name") == '<b>&"'
    assert tree[0][1].find("system-err").text == "</pre><script>]]>"


def test_a_report_of_nothing_is_a_page():
    assert "no cases" in page(Report([]))


@needs_browser
@pytest.mark.parametrize("width, dark", ((1280, False), (390, True)), ids=("wide and light", "narrow and dark"))
def test_a_browser_shows_the_page_and_asks_for_nothing_more(tmp_path, width, dark):
    path = tmp_path / "report.html"
    path.write_text(page(large()))
    with Browser(width=width, dark=dark) as browser:
        browser.open(path.as_uri())
        assert browser.requests == [path.as_uri()]
        assert browser.complaints == []
        assert browser.value("document.documentElement.scrollWidth") <= width  # wide maps scroll by themselves
        dim = browser.value("getComputedStyle(document.body).color") == "rgb(255, 255, 255)"
        assert dim is dark
        shown = browser.value("[...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
        assert ["fail" in shown[0], "crash" in shown[1], "pass" in shown[2]] == [True] * 3
        browser.value("document.querySelector('tbody a').click()")
        assert browser.value("document.querySelector(location.hash).getBoundingClientRect().top") < 5
        assert browser.value(
            "[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().height > 20)"
        )
        assert browser.value(OVERLAPS) == []


# Numbers beside a map that touch each other, or that lie outside the drawing.
OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const around = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll('text')].map(text => [text.getBoundingClientRect(), text.textContent]);
  const outside = boxes.filter(([a]) => a.left < around.left || a.right > around.right || a.bottom > around.bottom);
  const touching = boxes.filter(([a], i) => boxes.some(([b], j) => i < j &&
    a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom));
  return [...outside, ...touching].map(([, name]) => name);
})"""


@needs_browser
def test_the_page_lets_a_browser_load_nothing(tmp_path):
    path = tmp_path / "report.html"
    (tmp_path / "picture.svg").write_text("<svg/>")
    smuggled = '<img src="picture.svg"><script>document.title = "run"</script></body>'
    path.write_text(page(large()).replace("</body>", smuggled))
    with Browser() as browser:
        browser.open(path.as_uri())
        assert [(tmp_path / "picture.svg").as_uri()] == browser.requests[1:] and browser.blocked == ["csp"]
        assert any("picture.svg" in words and "Content Security Policy" in words for words in browser.complaints)
        assert browser.value("document.title") == "mla-oracle suite"
