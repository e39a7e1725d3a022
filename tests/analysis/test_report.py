"""The report's files: valid JSON, escaped HTML, nothing from outside, figures that follow the theme."""

import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from odevit.analysis import ANALYSES, Finding, HtmlFigure, Study, register_analysis, run_analyses
from odevit.analysis.report import TEMPLATES, plain, readable, write_report
from odevit.analysis.report.html_figures import MANY_POINTS, animation, paths3d, svg
from odevit.analysis.report.style import CSS_VARIABLES, PALETTE, color, figure_style, subplots

COMMAND = "odevit analyze model --data digits"


def line_figure(points: int = 20):
    with figure_style():
        figure, axes = subplots()
        axes.plot(np.linspace(0, 1, points), np.random.default_rng(0).random(points), label="a curve")
        axes.set_xlabel("time")
        axes.legend()
    return figure


def report(folder: Path, findings: list[Finding], **changes) -> tuple[str, dict]:
    arguments = {"title": "A model", "command": COMMAND, "meta": {"sampling": "all 10"}}
    path = write_report(findings, folder, **(arguments | changes))
    assert path == folder / "report.html"
    return path.read_text(), json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


def test_values_round_trip(tmp_path):
    values = {
        "a/number": 0.1 + 0.2,
        "a/tensor": torch.tensor([[1.5, math.nan], [math.inf, -math.inf]]),
        "a/half": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
        "a/array": np.arange(3),
        "a/scalar": np.float32(0.25),
        "b/nested": {"classes": {3: (np.int64(7), True, None, "text")}, "path": Path("runs") / "x"},
    }
    _, content = report(tmp_path, [Finding(name, value, "T", "Text.") for name, value in values.items()])
    assert content["values"] == {
        "a/number": 0.1 + 0.2,
        "a/tensor": [[1.5, "NaN"], ["Infinity", "-Infinity"]],
        "a/half": 0.5,
        "a/array": [0, 1, 2],
        "a/scalar": 0.25,
        "b/nested": {"classes": {"3": [7, True, None, "text"]}, "path": str(Path("runs") / "x")},
    }
    assert content["command"] == COMMAND
    assert content["meta"]["sampling"] == "all 10"
    assert {"date", "odevit", "torch"} <= content["meta"].keys()
    assert float(content["values"]["a/tensor"][1][1]) == -math.inf


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="object"):
        plain(object())


def test_a_failed_report_leaves_the_old_one(tmp_path):
    before, _ = report(tmp_path, [Finding("a/x", 1, "T", "Text.")])
    with pytest.raises(ValueError, match=r"own name.*a/x"):
        report(tmp_path, [Finding("a/x", 1, "T", "Text."), Finding("a/x", 2, "T", "Text.")])
    with pytest.raises(ValueError, match="object"):
        report(tmp_path, [Finding("a/x", object(), "T", "Text.")])
    assert (tmp_path / "report.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]  # no temporary file


def test_user_text_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\"$title"
    figure = line_figure()
    findings = [
        Finding("a/fact", evil, evil, evil),
        Finding("a/table", {evil: {evil: evil}}, evil, evil, figure),
        Finding("a/paths", None, evil, evil, paths3d([{"points": [[0, 0, 0], [1, 1, 1]], "label": evil}])),
        Finding("a/gif", None, evil, evil, animation([np.zeros((4, 4))], label=evil)),
        Finding(evil, 1, evil, evil, headline=evil, key_numbers={evil: evil}),
        Finding("a/second", 1, evil, evil, headline=evil),
    ]
    page, _ = report(tmp_path, findings, title=evil, command=evil, meta={evil: evil})
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert page.count("<script") == 2  # the viewer and the data of one paths3d
    data = re.search(r'<script type="application/json">(.*?)</script>', page)
    assert data is not None
    assert json.loads(data[1])["paths"][0]["label"] == evil


@pytest.mark.slow
def test_nothing_from_outside_and_unique_ids(tmp_path):
    findings = [Finding(f"a/{k}", None, "T", "Text.", line_figure()) for k in range(3)]
    page, _ = report(tmp_path, findings)
    references = re.findall(r"(?:src|srcset|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", page)
    assert references
    assert all(reference.startswith(("#", "data:")) for reference in references), references
    assert "@import" not in page
    outside = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert outside <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }  # names of vocabularies, not fetched
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {reference[1:] for reference in references if reference.startswith("#")} <= set(ids)


def test_figures_say_how_to_read_and_remake_them(tmp_path):
    findings = [
        Finding("lyapunov/top", 0.25, "Top exponent", "Positive means apart.", line_figure()),
        Finding("robustness/k", 3, "Steps", "Fewer is cheaper."),
    ]
    page, _ = report(tmp_path, findings, command=COMMAND + " --only lyapunov,robustness")
    assert "Positive means apart." in page
    bare = re.sub(r"</?span>", "", page)
    assert f"<code>{COMMAND} --only lyapunov</code>" in bare
    assert "<dt>Steps</dt><dd>3</dd>" in page
    page, _ = report(tmp_path, findings, command="odevit audit teacher")
    assert "--only" not in page


def test_what_the_findings_put_on_top(tmp_path):
    """In their own order; without a headline, what the first one says."""
    silent = Finding("a/x", 1, "T", "Text of the first.")
    loud = [
        Finding("b/y", 2, "T", "Text.", headline="Lede.", key_numbers={"one": 0.25, "two": math.inf}),
        Finding("c/z", 3, "T", "Text.", headline="Second.", key_numbers={"three": "50 %"}),
    ]
    page, content = report(tmp_path, [silent, *loud])
    assert content["headline"] == ["Lede.", "Second."]
    assert '<p class="lede">Lede.</p><ul class="found"><li>Second.</li></ul>' in page
    numbers = re.search(r'<dl class="numbers".*?</dl>', page)
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", numbers[0]) == [("one", "0.25"), ("two", "∞"), ("three", "50 %")]
    page, content = report(tmp_path, [silent])
    assert content["headline"] == ["Text of the first."]
    assert 'class="numbers"' not in page


def test_small_tables_are_shown_and_long_ones_pointed_to(tmp_path):
    page, _ = report(
        tmp_path,
        [
            Finding("a/classes", {"cat": {"accuracy": 0.5}, "dog": {"exponent": 1e-5}}, "T", "Text."),
            Finding("a/long", list(range(1000)), "T", "Text."),
        ],
    )
    assert "<tr><th>dog</th><td>not available</td><td>1 × 10⁻⁵</td></tr>" in page
    assert "report.json under <code>a/long</code>" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12800, "12,800"),
        (0.83125, "0.8313"),
        (-0.41, "−0.41"),
        (2.3e-5, "2.3 × 10⁻⁵"),
        (123456.7, "123,457"),
        (True, "yes"),
        (None, "not available"),
        ("-Infinity", "−∞"),
        ([1, 2.5], "1, 2.5"),
    ],
)
def test_readable(value, text):
    assert readable(value) == text


def test_svg_follows_the_theme():
    markup = svg(line_figure(), 'a "label"', "p")
    assert 'aria-label="a &quot;label&quot;"' in markup
    assert "<style" not in markup
    assert "stroke: var(--c0)" in markup
    assert not set(re.findall(r"#[0-9a-f]{6}", markup)) & set(CSS_VARIABLES)
    assert ">time</text>" in markup  # text stays text
    css = (TEMPLATES / "report.css").read_text()
    assert all(f"--c{index}: {value};" in css for index, value in enumerate(PALETTE))
    assert all(f"{variable}:" in css for variable in CSS_VARIABLES.values())
    assert color(12) == PALETTE[2]


@pytest.mark.slow
def test_many_points_become_pixels_and_reports_stay_small(tmp_path):
    assert "<image" not in svg(line_figure(100), "few", "p")
    assert "<image" in svg(line_figure(MANY_POINTS + 1), "many", "p")
    random = np.random.default_rng(0)
    with figure_style():
        cloud, axes = subplots()
        axes.scatter(*random.random((2, 5000)), s=3)
        pictures, panels = subplots(2, 2)
        for panel in panels.flat:
            panel.imshow(random.random((224, 224, 3)))
    page, _ = report(tmp_path, [Finding("a/1", None, "T", "T.", cloud), Finding("a/2", None, "T", "T.", pictures)])
    assert 10_000 < len(page) < 1_000_000
    empty, _ = report(tmp_path, [])
    assert len(empty) < 25_000


def test_animation_keeps_frames_and_rests_on_the_last():
    import base64

    from PIL import Image

    ramp = np.linspace(0, 1, 16 * 16).reshape(16, 16)
    figure = animation([ramp * k / 4 for k in range(5)], fps=10)
    match = re.search(r"data:image/gif;base64,([^\"]+)", figure.html)
    assert match is not None
    gif = Image.open(io.BytesIO(base64.b64decode(match[1])))
    durations, brightness = [], []
    for frame in range(gif.n_frames):
        gif.seek(frame)
        durations.append(gif.info["duration"])
        brightness.append(np.asarray(gif.convert("L"), dtype=float).mean())
    assert durations == [100] * 4 + [1200]
    assert np.allclose(brightness, [127.5 * k / 4 for k in range(5)], atol=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: animation([]), "at least one frame"),
        (lambda: animation([np.zeros((4, 4)), np.zeros((4, 5))]), "one size"),
        (lambda: animation([np.zeros((4, 4, 2))]), "shape"),
        (lambda: animation([np.zeros((4, 4))], fps=0), "positive"),
        (lambda: paths3d([]), "at least one path"),
        (lambda: paths3d([{"points": [[0, 0]], "label": "a"}]), r"\(m, 3\)"),
        (lambda: paths3d([{"points": [[0, 0, math.nan]], "label": "a"}]), "finite"),
    ],
)
def test_impossible_figures_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def registry(monkeypatch):
    """Two analyses of our own, and nothing else, for one test."""
    monkeypatch.setattr("odevit.analysis.MODULES", ())
    saved = dict(ANALYSES)
    ANALYSES.clear()

    @register_analysis("count", summary="How many images?")
    def count(study: Study) -> Iterator[Finding]:
        yield Finding("count/images", sum(len(x) for x, _ in study.batches("counting")), "Images", "How many.")

    @register_analysis("compare", summary="Like the teacher?", needs_teacher=True)
    def compare(study: Study) -> Iterator[Finding]:
        yield Finding("compare/teacher", study.teacher, "Teacher", "Which.", HtmlFigure("<p>compared</p>"))

    yield
    ANALYSES.clear()
    ANALYSES.update(saved)


def test_run_analyses(registry):
    told = []
    study = Study(None, torch.zeros(10, 1, 2, 2), torch.zeros(10), [], batch_size=4, progress=lambda *a: told.append(a))
    count, skipped = run_analyses(None, study)
    assert (count.name, count.value) == ("count/images", 10)
    assert told == [("counting", 4, 10), ("counting", 8, 10), ("counting", 10, 10)]
    assert (skipped.name, skipped.value, skipped.figure) == ("compare/skipped", None, None)
    assert "no teacher was given" in skipped.text
    study.teacher = "a teacher"
    assert [finding.name for finding in run_analyses(["compare"], study)] == ["compare/teacher"]
    with pytest.raises(ValueError, match=r"'lyapunow'.*count, compare"):
        run_analyses(["count", "lyapunow"], study)
