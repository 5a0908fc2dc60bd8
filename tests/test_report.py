"""Reports of real runs of papermill: what a reader sees, and what a page must never hold."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from eagle3kit import report
from eagle3kit.errors import KitError
from eagle3kit.files import write_json
from eagle3kit.pages import tidy

ROOT = Path(__file__).parent.parent
HEADLINE = "2 < 3 & <script>alert(1)</script>"
SERVED = {
    "acceptance_length": 1.6213, "acceptance_length_low": 1.553, "acceptance_length_high": 1.691, "drafts": 1776,
    "prompts": 48, "predicted_length": 1.583, "predicted_low": 1.51, "predicted_high": 1.65, "tokens_per_second": 52.9,
    "tokens_per_second_plain": 38.2, "speedup": 1.385, "lossless_share": 1.0,
}
SHOWS = """
import sys, warnings
from IPython.display import HTML, Javascript, display
import pandas as pd
from eagle3kit import plots, tables
never_shown_variable = 1
print("printed-to-the-log")
print("written-to-stderr", file=sys.stderr)
warnings.warn("a-warning-of-somebody")
plots.histogram([1, 2, 3, 4, 5], "answer length", "tokens")
tables.html_tokens(["<|im_start|>", "a <b>", "\\n"], [0, 1, 1], "row 7 & more")
tables.table(pd.DataFrame({"source": ["<i>mt</i>"], "share": [0.123456], "tokens": [123456]}), "Tokens")
display(pd.DataFrame({f"a_rather_long_column_name_{i}": [i] for i in range(30)}))
display(Javascript("alert('js')"))
display(HTML('<p onclick="x()">kept</p><script src="https://x.example/a.js"></script><img src="https://x.example/b.png">'
             '<style>@import url(https://x.example/c.css);</style>'))
display({"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Widget()"}, raw=True)
from matplotlib import pyplot
pyplot.plot([1, 2])
pyplot.show()
"""


def notebook(path, question, *cells):
    """A notebook of one question and code cells; a cell given as (tag, code) is tagged."""
    made = [new_markdown_cell(f"# {question}\n\nWhy, and [where it is from](https://arxiv.org/abs/2503.01840).")]
    for cell in cells:
        tag, code = cell if isinstance(cell, tuple) else ("", cell)
        made += [new_markdown_cell("# What follows"), new_code_cell(code, metadata={"tags": [tag] if tag else []})]
    written = new_notebook(cells=made)
    written.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(written, path)
    return path


def execute(source, stage):
    """Run a notebook with the real papermill as the pipeline does; its exit code."""
    stage.mkdir(parents=True)
    command = [sys.executable, "-m", "papermill", source, stage / "running.ipynb", "-k", "python3", "--no-progress-bar"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    (stage / "log.txt").write_text(done.stderr)
    os.rename(stage / "running.ipynb", stage / ("failed.ipynb" if done.returncode else "notebook.ipynb"))
    return done.returncode


def finish(stage, headline, **numbers):
    stage.mkdir(parents=True, exist_ok=True)
    machine = {"system": "Linux", "processor": "x86_64", "cores": 2, "memory_gib": 23.4, "gpus": []}
    write_json(stage / "result.json", {
        "stage": stage.name, "headline": headline, "numbers": numbers, "seconds": 185.0,
        "finished": "2026-11-29T18:05:12+00:00", "id": "1",
        "fingerprint": {"params": {"seed": 0, "training.epochs": 4}},
        "provenance": {"commit": "c94e383a", "dirty": True, "versions": {"torch": "2.13.0"}, "machine": machine},
    })


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    return [
        notebook(folder / "00_shows.ipynb", "What does a page hold?", ("index", SHOWS), repr(HEADLINE)),
        notebook(folder / "01_raises.ipynb", "What if it raises?", "shown = 'before'; shown",
                 "from eagle3kit.errors import KitError\nraise KitError('no source <b>x</b>; see --help')", "'after'"),
        notebook(folder / "02_dies.ipynb", "What if the kernel dies?",
                 "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        notebook(folder / "08_later.ipynb", "What is `not` run?"),
    ]


@pytest.fixture(scope="module")
def executed(tmp_path_factory, sources):
    """A run with one stage done, one that raised and one whose kernel was killed; rendered once."""
    run = tmp_path_factory.mktemp("outputs") / "mixed"
    codes = [execute(source, run / source.stem) for source in sources[:3]]
    assert codes[0] == 0 and all(codes[1:])
    finish(run / "00_shows", HEADLINE, **SERVED)
    for stage, cause in (("01_raises", "KitError: no source <b>x</b>"), ("02_dies", "the kernel died")):
        write_json(run / stage / "failure.json", {"stage": stage, "cause": cause, "log": f"{stage}/log.txt"})
    report.render(run, sources)
    return run


@pytest.fixture
def run(executed, tmp_path):
    """A copy of the executed run, to be changed."""
    return Path(shutil.copytree(executed, tmp_path / "mixed"))


def pages(run):
    return {page.parent.name if page.name == "report.html" else "index": page.read_text(encoding="utf-8")
            for page in [run / "index.html", *run.glob("*/report.html")]}


def text(page):
    """A page's words in order, without its tags and styles."""
    return " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<style.*?</style>", "", page)).split())


def test_a_page_needs_nothing_from_outside_and_runs_nothing(executed):
    for name, page in pages(executed).items():
        assert not re.search(r"""(?i)\b(src|href)\s*=\s*["']?\s*(https?:|//)""", page), name
        assert not re.search(r"(?i)<script|<link|<iframe|@import|url\(|\son\w+=|javascript:|widget-view", page), name
        assert "default-src 'none'" in page
    assert "where it is from (arxiv.org/abs/2503.01840)" in text(pages(executed)["00_shows"])


def test_a_page_shows_outputs_and_neither_code_nor_what_was_printed(executed):
    page = pages(executed)["00_shows"]
    for absent in ("never_shown_variable", "printed-to-the-log", "written-to-stderr", "a-warning-of-somebody", "¶",
                   "Widget()", "Figure size"):
        assert absent not in page, absent
    for present in ("kept", "a_rather_long_column_name_29", "row 7 &amp; more", "0.123", "123,456", "&lt;i&gt;mt"):
        assert present in page, present
    assert page.count("<h1") == 1


def test_every_picture_has_a_text_alternative_with_a_number(executed):
    found = 0
    for page in pages(executed).values():
        for picture in re.findall(r"<img[^>]*>", page):
            found += 1
            assert re.search(r'alt="[^"]*\d[^"]*"', picture), picture[-200:]
    assert found == 4  # ours and one without a description on the stage's page, and both again on the index
    assert 'alt="Histogram of answer length (tokens) over 5: median 3, ' in pages(executed)["index"]


@pytest.mark.parametrize(
    "stage, cause", [("01_raises", "no source &lt;b&gt;x&lt;/b&gt;"), ("02_dies", "the kernel died")])
def test_a_failed_stage_says_so_in_words_whatever_its_notebook_claims(executed, stage, cause):
    if stage == "02_dies":
        assert "Exception" not in (executed / stage / "failed.ipynb").read_text()  # the notebook itself gives no hint
    found = pages(executed)
    assert re.search(rf'(?s)role="alert".*FAILED.*{cause}.*href="log.txt"', found[stage])
    assert re.search(rf'(?s)role="alert".*FAILED at {stage}.*{cause}', found["index"])
    assert f'href="{stage}/log.txt"' in found["index"] and "FAILED" in re.search("<title>.*</title>", found["index"])[0]


def test_an_error_is_its_message_in_place_and_nothing_after_it(executed):
    page = text(pages(executed)["01_raises"])
    assert "before" in page and "This cell failed. no source &lt;b&gt;x&lt;/b&gt;; see --help" in page
    assert "Traceback" not in page and "after" not in page and "An Exception was encountered" not in page


def test_html_in_a_headline_is_text(executed):
    for name in ("index", "00_shows"):
        assert "2 &lt; 3 &amp; &lt;script&gt;alert(1)&lt;/script&gt;" in pages(executed)[name]
    # What finish() returned is not shown again, nor the words that lead to it.
    assert text(pages(executed)["00_shows"]).count("alert(1)") == 1
    assert text(pages(executed)["00_shows"]).count("What follows") == 1


def test_the_index_answers_first_then_goes_stage_by_stage(executed):
    words = text(pages(executed)["index"]).replace("\N{NO-BREAK SPACE}", " ")
    assert "of 1.62 tokens per verify step (95 % interval 1.55 to 1.69, 1,776 drafts, 48 prompts)." in words
    for part in ("1.58 was predicted (1.51 to 1.65)", "52.9 tokens a second", "38.2 : 1.39 times as fast",
                 "100 % of the greedy answers equal", "Linux x86_64, 2 cores, 23.4 GiB, no GPU, 2026-11-29",
                 "1 of 4 done, 3 min 05 s in all", "00_shows What does a page hold? DONE 3 min 05 s 2 &lt; 3",
                 "08_later What is not run? NOT RUN"):
        assert part in words, part
    assert words.index("acceptance length of") < words.index("Stage by stage")
    assert 'href="00_shows/report.html"' in pages(executed)["index"]
    assert "08_later/report.html" not in pages(executed)["index"]


@pytest.mark.parametrize(("speedup", "interval", "words"), [
    (0.86, [0.71, 1.04], "0.860 times as fast (0.710 to 1.04), no more than noise."),
    (0.76, [0.73, 0.78], "0.760 times as fast (0.730 to 0.780), that is slower."),
    (0.76, None, "0.760 times as fast, that is slower."),
    (1.3, [1.2, 1.4], "1.30 times as fast (1.20 to 1.40)."),
    (1.3, ["x", 1], "1.30 times as fast."),
])  # fmt: skip
def test_a_speedup_is_told_with_its_noise(run, speedup, interval, words):
    finish(run / "00_shows", "h", **SERVED | {"speedup": speedup, "speedup_interval": interval})
    assert words in text(report.render(run, ()).read_text())


def test_provenance_is_folded_and_tells_what_differs_from_the_defaults(executed):
    for name in ("index", "00_shows"):
        folded = text(re.search("(?s)<details>.*</details>", pages(executed)[name])[0])
        assert "c94e383a with uncommitted changes" in folded and "torch 2.13.0" in folded
        assert "training.epochs 4 8" in folded and "seed" not in folded


@pytest.mark.parametrize("absent", [*SERVED, "all"])
def test_the_index_does_without_any_of_the_numbers(run, absent):
    finish(run / "00_shows", "h", **{name: number for name, number in SERVED.items() if absent not in (name, "all")})
    words = text(report.render(run, ()).read_text())
    assert "None" not in words and "nan" not in words.lower().split()
    assert ("No acceptance length has been served yet" in words) == (absent in ("acceptance_length", "all"))


def test_the_verdict_leads_where_nothing_was_served(run):
    finish(run / "00_shows", "h")
    finish(run / "01_raises", "GO BELOW: 1.3x up to concurrency 8", verdict={"word": "GO BELOW"})
    words = text(report.render(run, ()).read_text())
    asked = words.index("Would a draft pay? GO BELOW: 1.3x up to concurrency 8. No acceptance length has been served yet")
    assert asked < words.index("Stage by stage")
    finish(run / "00_shows", "h", **SERVED)
    assert "Would a draft pay" not in text(report.render(run, ()).read_text())


def test_only_what_changed_is_rendered_again(run):
    report.render(run, ())
    before = {page: page.stat().st_mtime_ns for page in run.glob("*/report.html")}
    report.render(run, ())
    assert before == {page: page.stat().st_mtime_ns for page in run.glob("*/report.html")}
    finish(run / "00_shows", "another headline")
    report.render(run, ())
    assert {page.parent.name for page in before if page.stat().st_mtime_ns != before[page]} == {"00_shows"}
    assert "another headline" in (run / "00_shows/report.html").read_text()


def test_a_stage_without_a_result_is_not_done(run, sources):
    os.remove(run / "00_shows/result.json")
    words = text(report.render(run, sources).read_text())
    assert "UNFINISHED at 00_shows" in words and "0 of 4 done" in words


def test_the_later_of_a_result_and_a_failure_counts(run, sources):
    finish(run / "01_raises", "mended by hand")
    assert "What if it raises? DONE 3 min 05 s mended by hand" in text(report.render(run, sources).read_text())
    write_json(run / "01_raises/failure.json", {"stage": "01_raises", "cause": "broken again", "log": "log.txt"})
    assert "What if it raises? FAILED broken again" in text(report.render(run, sources).read_text())


def test_a_result_cut_off_in_the_middle_is_a_failure(run, sources):
    (run / "00_shows/result.json").write_text('{"headline": ')
    words = text(report.render(run, sources).read_text())
    assert "FAILED at 00_shows" in words and "result.json is not JSON (line 1" in words


def test_a_notebook_cut_off_in_the_middle_still_gets_its_page(run):
    notebook = run / "00_shows/notebook.ipynb"
    notebook.write_bytes(notebook.read_bytes()[:500])
    report.render(run, ())
    assert "was cut off while it was written" in (run / "00_shows/report.html").read_text()


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(KitError, match="no run to report on at .*typo"):
        report.render(tmp_path / "typo", ())


def test_tables_scroll_in_their_own_box_and_words_go_left():
    page = tidy("<table border=1><tr><th>a</th><th>b</th><th>c</th></tr>"
                "<tr><td>x</td><td>1.5</td><td>word</td></tr></table>")
    assert re.match('<div[^>]*class="wide"[^>]*><table><tr>', page) and 'tabindex="0"' in page
    assert '<td class="short">1.5</td>' in page and '<td class="short text">word</td>' in page


# ---- in a real browser

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=2000"]
MEASURE = """<script>addEventListener("load", () => {
const style = element => getComputedStyle(element)
const words = [...document.querySelectorAll("td, p, figcaption, summary")]
parent.postMessage(JSON.stringify({page: document.scrollingElement.scrollWidth, window: innerWidth,
paper: style(document.body).backgroundColor,
small: words.filter(e => parseFloat(style(e).fontSize) < 12).length}), "*") })
</script>"""
# A window of Chromium is at least 500 pixels wide, a frame may be as narrow as a phone.
FRAME = """<title></title><script>addEventListener("message", said => { document.title = said.data })</script>
<iframe src="page.html" width="%d" height="900" style="border: 0"></iframe>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("EAGLE3KIT_REQUIRE_BROWSER") == "1":
            pytest.fail("EAGLE3KIT_REQUIRE_BROWSER=1, but there is no chromium, chromium-browser or google-chrome")
        pytest.skip("no chromium, chromium-browser or google-chrome to look at the report with")

    def look(*options):
        profile = tmp_path_factory.mktemp("profile")
        command = [found, *FLAGS, f"--user-data-dir={profile}", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    return look


@pytest.fixture(params=["index.html", "00_shows/report.html", "01_raises/report.html"])
def measure(request, browser, executed, tmp_path):
    """Measures of a page in a frame of some width; for that, and only here, the page may run a script."""
    page = re.sub("<meta http-equiv[^>]*>", "", (executed / request.param).read_text()) + MEASURE
    (tmp_path / "page.html").write_text(page)

    def look(width, *options):
        (tmp_path / "frame.html").write_text(FRAME % width)
        seen = browser("--window-size=1400,1000", *options, "--dump-dom", (tmp_path / "frame.html").as_uri())
        return json.loads(re.search("<title>(.*?)</title>", seen)[1])

    return look


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_is_wider_than_its_window(measure, width):
    measures = measure(width)
    assert measures["window"] == width and measures["page"] <= width and measures["small"] == 0, measures


@pytest.mark.browser
def test_a_page_follows_light_and_dark(measure):
    assert measure(800)["paper"] == "rgb(255, 255, 255)"
    assert measure(800, "--blink-settings=preferredColorScheme=0")["paper"] == "rgb(22, 24, 27)"


@pytest.mark.browser
def test_a_page_prints(browser, executed, tmp_path):
    browser("--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}", (executed / "index.html").as_uri())
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", (tmp_path / "page.pdf").read_bytes())) >= 1
