"""The report in a real browser: nothing asked of the network, no error, every figure visible, light, dark, phone."""

from contextlib import ExitStack

import numpy as np
import pytest
from browsers import opened

from odevit.analysis import Finding
from odevit.analysis.report import write_report
from odevit.analysis.report.html_figures import animation, paths3d
from odevit.analysis.report.style import color, figure_style, image_axes, subplots

DESKTOP, PHONE = (1200, 800), (375, 812)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    random = np.random.default_rng(0)
    with figure_style():
        curve, axes = subplots()
        axes.loglog([1, 10, 100], [1, 0.1, 0.01], marker="o", label="error")
        axes.legend()
        cloud, panels = subplots(1, 2, width=8)
        for index, panel in enumerate(panels):
            panel.scatter(*random.normal(size=(2, 3000)), s=3, color=color(index))
        picture, axes = subplots()
        axes.imshow(random.random((32, 32, 3)))
        image_axes(axes)
    helix = [[np.cos(t), np.sin(t), t / 3] for t in np.linspace(0, 6, 30)]
    line = [[0, 0, 0], [1, 0.5, 1]]
    paths = [
        {"points": helix, "label": "student", "color_index": 0},
        {"points": line, "label": "teacher", "color_index": 2, "dashed": True},
    ]
    findings = [
        Finding(
            "steps/order",
            0.98,
            "Observed order",
            "One for Euler.",
            headline="One sentence.",
            key_numbers={"Observed order": 0.98},
        ),
        Finding("steps/error", {"euler": 0.1}, "Error", "Lower is better.", curve, headline="Another sentence."),
        Finding("cloud/points", None, "Cloud", "Each point is an image.", cloud),
        Finding("cloud/long_name_" + "x" * 80, "y" * 200, "Title " * 20, "Long " * 60),
        Finding("cloud/wide", {"row": {f"column {k}": k / 7 for k in range(20)}}, "A wide table", "Read it."),
        Finding("attention/map", None, "Map", "Bright is looked at.", picture),
        Finding("attention/video", None, "Video", "It repeats.", animation(random.random((4, 48, 48, 3)))),
        Finding("trajectory/paths", None, "Paths", "Drag it.", paths3d(paths)),
    ]
    folder = tmp_path_factory.mktemp("report")
    command = "odevit analyze runs/" + "a-long-name-" * 12 + " --data digits"
    return write_report(findings, folder, title="A model", command=command, meta={"sampling": "all"}).as_uri()


@pytest.fixture
def visit(browser, address):
    """Opens the report."""
    with ExitStack() as pages:
        yield lambda size, scheme: pages.enter_context(opened(browser, address, size, color_scheme=scheme))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_figure_is_visible_and_the_page_fits(visit, size, scheme):
    page = visit(size, scheme)
    figures = page.locator(".frame > svg, .frame img, .frame canvas")
    assert figures.count() == 5
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        assert box is not None
        assert box["width"] > 40
        assert box["height"] > 40
        assert figure.is_visible()
    image = page.locator(".frame img")
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 48
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    top = page.locator(".lede, .numbers")
    assert all(item.bounding_box()["y"] < size[1] for item in top.all())  # what was found is on the first screen


def luminances(page, elements, property_name):
    """Of every such element's colour, 0 black … 1 white."""
    script = f"all => all.map(e => getComputedStyle(e).{property_name}.match(/[0-9.]+/g).slice(0, 3).map(Number))"
    return np.array(page.locator(elements).evaluate_all(script)) @ [0.2126, 0.7152, 0.0722] / 255


def test_text_stands_out_in_both_themes(visit):
    light, dark = visit(DESKTOP, "light"), visit(DESKTOP, "dark")
    labels = ".frame > svg text"  # ticks are muted, legends are ink
    assert luminances(light, "body", "backgroundColor") > 0.9
    assert luminances(dark, "body", "backgroundColor") < 0.15
    assert luminances(light, labels, "fill").max() < 0.45
    assert luminances(dark, labels, "fill").min() > 0.55
    assert luminances(dark, "p, dt, dd", "color").min() > 0.55
    dark.emulate_media(color_scheme="light")  # an open page follows the switch
    assert luminances(dark, labels, "fill").max() < 0.45


PIXELS = """canvas => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0, sum = 0;
  for (let i = 3; i < data.length; i += 4) if (data[i]) { drawn++; sum = (sum * 31 + i * (data[i - 3] + 1)) % 1e9; }
  return [drawn, sum];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paths_turn_and_hide(visit, scheme):
    page = visit(DESKTOP, scheme)
    canvas = page.locator(".paths3d canvas")
    canvas.scroll_into_view_if_needed()
    drawn, first = canvas.evaluate(PIXELS)
    assert drawn > 500
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x + 10, y)
    assert canvas.evaluate(PIXELS)[1] == first  # moving without pressing does nothing
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 120, y + 30, steps=4)
    page.mouse.up()
    turned = canvas.evaluate(PIXELS)
    assert turned[1] != first
    canvas.press("ArrowLeft")
    assert canvas.evaluate(PIXELS)[1] != turned[1]
    canvas.press("ArrowRight")
    with_student = canvas.evaluate(PIXELS)
    button = page.get_by_role("button", name="student")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert canvas.evaluate(PIXELS)[0] < with_student[0]
    button.click()
    assert canvas.evaluate(PIXELS) == with_student
