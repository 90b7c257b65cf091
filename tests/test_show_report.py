"""A report to look at: terminal, page, figure, pprof."""

import dataclasses
import gzip
import json
import re
import shutil
import subprocess

import pytest

from remat._report._buffer import Buffer
from remat._report._build import report_from_program
from remat._report._pprof import Profile
from remat._report._report import MemoryReport
from remat._report._timeline import TimelinePoint
from remat._show.page import MAX_ROWS
from remat._show.report import report_text
from remat._show.timeline import timeline_text
from tests.hlo_programs import TARGETS, donated, stacked


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    return report_from_program(stacked("h100"))


def layered(report, n_layers=80, n_points=2000) -> MemoryReport:
    """As many buffers and points as an unrolled 70B model has."""
    one = report.buffers[0]
    buffers = tuple(
        dataclasses.replace(
            one,
            bytes=10**9 - 1000 * layer - i,
            module_path=f"Llama/layers_{layer}/attention/self_attention/projection_{i}",
            label=f"attention_projection_{i}",
            category=("residuals", "parameters", "optimizer")[i % 3],
        )
        for layer in range(n_layers)
        for i in range(60)
    )
    points = tuple(
        TimelinePoint(
            position=3 * i,
            instruction=f"input_multiply_reduce_fusion.{i}",
            device_bytes=10**9 + (i if i < 1200 else 2400 - i) * 10**6,
            host_bytes=i,
            on_chip_bytes=0,
            phase="forward" if i < 1000 else "backward",
            n_runs=1,
        )
        for i in range(n_points)
    )
    return dataclasses.replace(report, buffers=buffers, timeline=points)


# Terminal


@pytest.mark.parametrize("name", TARGETS)
def test_the_terminal_shows_peak_categories_and_buffers(name):
    text = str(report_from_program(stacked(name)))
    assert text.startswith("jit_stacked_loss on")
    assert "residuals" in text and "▲ peak" in text
    assert "hlo_programs.py:" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [60, 90, 140])
def test_the_terminal_view_keeps_to_the_width(report, width):
    assert max(map(len, report_text(report, width).splitlines())) <= width


def test_a_report_of_totals_only_is_shown(report):
    totals = dataclasses.replace(report, buffers=(), timeline=(), recomputed=())
    assert "peak" in str(totals) and "largest" not in str(totals)
    assert "<html" in totals.to_html()


def test_the_timeline_keeps_the_highest_point_of_each_column():
    points = [
        TimelinePoint(
            position=i,
            instruction=f"i{i}",
            device_bytes=8 if i == 501 else 4,
            host_bytes=0,
            on_chip_bytes=0,
            phase=None,
            n_runs=1,
        )
        for i in range(1000)
    ]
    rows = timeline_text(points, width=40, height=2).plain.splitlines()
    assert rows[0].count("█") == 1
    assert rows[2].index("▲") == rows[0].index("█")


# Data for other tools


def test_pprof_has_the_bytes_of_every_buffer(report, tmp_path):
    path = tmp_path / "memory.pb.gz"
    data = report.to_pprof(path)
    assert path.read_bytes() == data == report.to_pprof()
    profile = Profile.FromString(gzip.decompress(data))
    strings = profile.string_table
    assert strings[0] == ""
    assert [strings[kind.unit] for kind in profile.sample_type] == ["count", "bytes"]
    assert [list(sample.value) for sample in profile.sample] == [
        [1, buffer.bytes] for buffer in report.buffers
    ]
    names = {f.id: strings[f.name] for f in profile.function}
    places = {p.id: names[p.line[0].function_id] for p in profile.location}
    largest = profile.sample[0]
    assert [places[id] for id in largest.location_id] == ["tanh", "residuals"]
    labels = {strings[one.key]: strings[one.str] for one in largest.label}
    assert labels["memory_space"] == "device" and labels["phase"] == "forward"


def test_the_figure_has_timeline_and_treemap(report):
    figure = report.plot()
    treemap = figure.data[-1]
    device = sum(b.bytes for b in report.buffers if b.memory_space == "device")
    assert treemap.values[treemap.ids.index("peak")] == device
    heights = [max(trace.y) for trace in figure.data[:-1]]
    assert max(heights) == report.live_peak_bytes / 2**30


# The page


def data_of(page: str) -> dict:
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_needs_nothing_but_itself(report, tmp_path):
    page = report.to_html(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page
    assert "default-src 'none'" in page
    addresses = re.findall(r"https?://[^\s\"']+", page)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<img|\ssrc=|@import|url\(", page)


def test_the_page_has_every_buffer_and_the_peak(report):
    data = data_of(report.to_html())
    size = data["buffers"]["columns"].index("bytes")
    assert [row[size] for row in data["buffers"]["rows"]] == [
        buffer.bytes for buffer in report.buffers
    ]
    assert max(point[2] for point in data["timeline"]) == report.live_peak_bytes


def test_names_cannot_break_out_of_the_page(report):
    bad = "</script><script>alert(1)</script>"
    buffer: Buffer = dataclasses.replace(report.buffers[0], module_path=bad)
    page = dataclasses.replace(report, buffers=(buffer,), module=bad).to_html()
    assert "<script>alert" not in page
    path = data_of(page)["buffers"]["columns"].index("module_path")
    assert data_of(page)["buffers"]["rows"][0][path] == bad


def test_the_page_of_a_70b_model_is_small(report):
    assert len(layered(report).to_html()) < 6e6
    most = layered(report, n_layers=400)
    assert len(most.buffers) > MAX_ROWS
    assert len(most.to_html()) < 6e6
    assert "smallest buffers are not" in data_of(most.to_html())["notes"][-1]


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """
<script>
function results() {
  const rows = () => [...document.querySelectorAll("#buffers tbody tr")];
  const cell = (n) => rows()[0].children[n].textContent;
  const out = {};
  out.tiles = document.querySelectorAll(".tiles button").length;
  out.peak = document.querySelector(".peaktext").textContent;
  out.rows = rows().length;
  out.largest = cell(0);
  const heads = [...document.querySelectorAll("#buffers th button")];
  heads[0].click();
  out.smallest = cell(0);
  out.sorted = document.querySelector("#buffers th").getAttribute("aria-sort");
  const filter = document.querySelector("#buffers input");
  filter.value = "layers_3/ projection_7";
  filter.dispatchEvent(new Event("input"));
  out.filtered = rows().length;
  out.filteredName = rows()[0].querySelector(".name").textContent;
  const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
  const hover = (share) => svg.dispatchEvent(new PointerEvent("pointermove",
    { clientX: box.left + share * box.width, clientY: box.top + 50, bubbles: true }));
  const read = () => document.querySelector(".readout").textContent;
  hover(0.3); out.hover = read();
  hover(0.9); out.hoverLater = read();
  const press = (where, key) =>
    where.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const key = (one) => press(svg, one);
  key("p"); out.atPeak = read();
  key("ArrowRight"); out.afterPeak = read();
  const paths = () => svg.querySelectorAll("path")[0].getAttribute("d").length;
  const all = paths(); key("+"); key("+"); key("+"); out.zoomed = paths() < all;
  key("0"); out.unzoomed = paths() === all;
  document.querySelector(".tiles button").click();
  out.crumbs = document.querySelectorAll("#treemap nav button").length;
  press(document.querySelector("#treemap"), "Escape");
  out.crumbsAfter = document.querySelectorAll("#treemap nav button").length;
  out.wide = document.documentElement.scrollWidth > window.innerWidth;
  out.dark = getComputedStyle(document.body).backgroundColor;
  return out;
}
let answer;
try { answer = results(); } catch (error) { answer = { error: String(error) }; }
document.documentElement.setAttribute("data-results", JSON.stringify(answer));
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(report, width, tmp_path):
    page = layered(report, n_layers=12).to_html()
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    found = in_browser(path, tmp_path, width)
    assert "error" not in found, found
    assert found["tiles"] >= 12
    assert found["peak"].startswith("▼ peak 2.0")
    assert found["rows"] == 200  # of 720; the rest behind "show more"
    assert (found["largest"], found["smallest"]) == ("0.93 GiB", "0.93 GiB")
    assert found["sorted"] == "ascending"
    assert found["filtered"] == 1
    assert "layers_3/" in found["filteredName"]
    assert "(forward)" in found["hover"] and "(backward)" in found["hoverLater"]
    assert found["atPeak"].startswith("peak: ")
    assert not found["afterPeak"].startswith("peak: ")
    assert found["zoomed"] and found["unzoomed"]
    assert (found["crumbs"], found["crumbsAfter"]) == (2, 1)
    assert not found["wide"]


def in_browser(path, folder, width, *flags):
    """What the script at the end of a page left on its root element."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--disable-quic", "--no-first-run", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    command += [*flags, "--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'data-results="([^"]*)"', done.stdout)
    assert match is not None, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(match[1].replace("&quot;", '"').replace("&amp;", "&"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_page_of_a_difference_in_a_browser(report, tmp_path):
    page = report.diff(report_from_program(donated("h100"))).to_html()
    script = (
        "<script>document.documentElement.setAttribute('data-results', JSON.stringify("
        "{rows: document.querySelectorAll('#changes tbody tr').length, "
        "hidden: document.querySelector('#changes').hidden}))</script></body>"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", script), encoding="utf-8")
    found = in_browser(path, tmp_path, 1200)
    assert found["rows"] >= 3 and not found["hidden"]
