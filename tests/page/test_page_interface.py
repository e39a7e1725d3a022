"""The page as a visitor meets it, in a browser: before a click, by hand, by keyboard, on a phone; hostile names."""

import base64
import copy
import io
import json
import re

import numpy as np
import pytest
import torch
from page.browsing import DESKTOP, PHONE, run_in_torch, small_model, visited
from PIL import Image

from odevit.analysis import Finding
from odevit.analysis.report import write_report
from odevit.checksum import checksum
from odevit.data import DataConfig, load_data
from odevit.page import half_precision, live, make_payload, write_page
from odevit.teachers.teacher import tiny_teacher

EVIL = "</script><img src=x onerror=alert(1)>&\"'`$title${1}\u2028"
PIXELS = 'document.querySelector(".live").image.pixels'


@pytest.fixture(scope="module")
def model():
    return small_model(hidden_size=32, final_norm="layer")


@pytest.fixture(scope="module")
def payload(model):
    images, labels = load_data(DataConfig(name="digits", image_size=8)).test.fetch(torch.arange(60))
    teacher = tiny_teacher("vit", image_size=8, patch_size=2, num_channels=1)
    return make_payload(
        model,
        title="Digits",
        class_names=[f"the {k}" for k in range(10)],
        images=images,
        labels=labels,
        teacher=teacher,
    )


@pytest.fixture(scope="module")
def address(payload, tmp_path_factory):
    return write_page(payload, tmp_path_factory.mktemp("page") / "page.html")


def answer_of(page) -> str:
    return re.search(r"Answer: (.*?),", page.locator(".status").text_content()).group(1)


def torch_answer(model, page, **options) -> str:
    pixels = torch.tensor(list(page.evaluate(f"Array.from({PIXELS})")), dtype=torch.uint8).view(1, 1, 8, 8)
    logits = run_in_torch(model, pixels, **({"solver": "euler", "steps": 6} | options))["logits"]
    return f"the {int(logits[-1].argmax())}"


def widths(page) -> list[float]:
    return page.locator(".bars b.path").evaluate_all("all => all.map((bar) => parseFloat(bar.style.width))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_first_example_is_answered_before_a_click_and_all_fits(browser, address, payload, model, size, scheme):
    with visited(browser, address, size=size, color_scheme=scheme, reduced_motion="reduce") as page:
        pixels = base64.b64decode(payload["examples"][0]["pixels"])
        assert bytes(page.evaluate(f"Array.from({PIXELS})")) == pixels
        assert answer_of(page) == torch_answer(model, page)
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        for name in (".picture", ".plane svg", ".bars", ".play", ".slider", ".heads canvas", ".solver", ".cost"):
            box = page.locator(name).first.bounding_box()
            assert box["width"] > 30, name
            assert box["x"] >= 0, name
            assert box["x"] + box["width"] <= size[0], name
        for name in (".picture", ".bars li:last-child") + ((".plane svg", ".play") if size == DESKTOP else ()):
            box = page.locator(name).bounding_box()
            assert box["y"] + box["height"] <= size[1], name  # in and out are on the first screen
        text, ground = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (text, ground)]
        assert (brightness[0] < brightness[1]) == (scheme == "light")
        assert sum(widths(page)) == pytest.approx(100, abs=0.1)


def test_everything_has_a_name_for_screen_readers_and_a_place_for_the_keyboard(browser, address):
    with visited(browser, address, reduced_motion="reduce") as page:
        for role, count in (("button", 14), ("slider", 2), ("combobox", 2), ("checkbox", 1), ("status", 1)):
            assert page.get_by_role(role).count() == count, role
        for role in ("button", "slider", "combobox", "checkbox", "img"):
            snapshots = [thing.aria_snapshot() for thing in page.get_by_role(role).all()]
            assert all(re.search(r'"[^"]*\w', snapshot) for snapshot in snapshots), snapshots
        reached = set()
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.className || document.activeElement.type"))
        assert {"file", "clear", "invert", "play", "slider", "solver", "steps", "other", "adaptive"} <= reached


def test_the_slider_moves_bars_path_and_attention_and_arrows_go_by_steps(browser, address, model, payload):
    pixels = torch.frombuffer(bytearray(base64.b64decode(payload["examples"][0]["pixels"])), dtype=torch.uint8)
    logits = run_in_torch(model, pixels.view(1, 1, 8, 8), solver="euler", steps=6)["logits"][:, 0]
    wanted = 100 * logits.softmax(-1)
    head = "document.querySelector('.heads canvas').toDataURL()"
    with visited(browser, address, reduced_motion="reduce") as page:
        assert widths(page) == pytest.approx(wanted[6].tolist(), abs=0.02)
        slider, seen = page.locator(".slider"), set()
        for step in (5, 4, 3):
            slider.press("ArrowLeft")
            assert page.locator(".clock").text_content() == f"t = {step / 6:.2f}, step {step} of 6"
            assert slider.get_attribute("aria-valuetext") == f"t = {step / 6:.2f}, step {step} of 6"
            assert widths(page) == pytest.approx(wanted[step].tolist(), abs=0.02)
            seen.add((page.locator("circle.now").get_attribute("cx"), page.evaluate(head)))
        assert len(seen) == 3
        slider.press("Home")
        assert widths(page) == pytest.approx(wanted[0].tolist(), abs=0.02)
        slider.fill("0.25")  # between steps 1 and 2: halfway between their logits
        middle = (
            run_in_torch(model, pixels.view(1, 1, 8, 8), solver="euler", steps=6)["logits"][1:3, 0].mean(0).softmax(-1)
        )
        assert widths(page) == pytest.approx((100 * middle).tolist(), abs=0.02)


def test_play_runs_from_the_start_to_the_end_and_can_be_paused(browser, address):
    with visited(browser, address, reduced_motion="reduce") as page:
        play, pause = (page.get_by_role("button", name=name, exact=True) for name in ("Play", "Pause"))
        clock = page.locator(".clock")
        assert clock.text_content() == "t = 1.00, step 6 of 6"
        page.emulate_media(reduced_motion="no-preference")
        play.click()
        pause.click()
        paused = clock.text_content()
        assert not paused.startswith("t = 1.00")  # it began again
        page.wait_for_timeout(100)
        assert clock.text_content() == paused
        page.locator(".slider").fill("0.9")
        play.press("Enter")
        pause.wait_for()
        play.wait_for()
        assert clock.text_content() == "t = 1.00, step 6 of 6"
        page.get_by_role("button", name="Example: the 3").click()  # another image is played from its start
        pause.wait_for()
        assert page.locator(".status").text_content().startswith("Answer")


def test_solvers_and_steps_are_counted_and_stand_side_by_side(browser, address, model):
    with visited(browser, address, reduced_motion="reduce") as page:
        cost = page.locator(".cost")
        page.get_by_label("Solver", exact=True).select_option("strang")
        page.locator(".cost th", has_text="strang").wait_for()
        assert "24 of F, 12 of G" in cost.inner_text()
        page.get_by_label("Steps", exact=True).fill("3")
        page.locator(".cost th", has_text="3 steps").wait_for()
        assert "12 of F, 6 of G" in cost.inner_text()
        assert re.search(r"Milliseconds\s+\d+\.\d", cost.inner_text())
        assert answer_of(page) == torch_answer(model, page, solver="strang", steps=3)
        assert page.locator("polyline.beside").count() == 0
        page.get_by_label("Beside it").select_option("rk4")
        page.locator(".cost th", has_text="rk4").wait_for()
        assert page.locator("polyline.beside").count() == 1
        assert page.locator(".bars b.beside").count() == 10
        page.get_by_label("Its steps").fill("12")
        page.locator(".cost th", has_text="rk4, 12 steps").wait_for()
        assert re.search(r"Evaluations\s+12 of F, 6 of G\s+48", cost.inner_text())
        assert page.locator(".legend").inner_text().split() == ["strang", "rk4", "teacher"]


def test_stopping_early_shows_when_and_saves_evaluations(browser, address):
    with visited(browser, address, reduced_motion="reduce") as page:
        page.get_by_label("Stop early").check()
        page.get_by_label("when ahead by").fill("-35")  # log-odds: 3 %
        page.locator(".cost td", has_text="step").wait_for()
        step = int(re.search(r"step (\d) of 6", page.locator(".cost").inner_text()).group(1))
        assert 1 <= step < 6
        assert re.search(rf"Evaluations\s+{step}\b", page.locator(".cost").inner_text())
        assert f"It stopped at t = {step / 6:.2f}." in page.locator(".status").text_content()
        assert page.locator(".clock").text_content() == f"t = 1.00, step {step} of 6, stopped"


def test_a_calibrated_rule_says_what_it_promises_and_where_it_no_longer_holds(browser, model, tmp_path):
    own = {"solver": "euler", "num_steps": 6, "checksum": checksum(model)}
    calibrated = copy.deepcopy(model)
    calibrated.config.halting = {"score": "margin", "threshold": 0.2, "alpha": 0.02, "delta": 0.05, **own}
    payload = make_payload(calibrated, title="T", class_names=[str(k) for k in range(10)])
    with visited(browser, write_page(payload, tmp_path / "page.html"), reduced_motion="reduce") as page:
        promise = page.locator(".promise")
        assert not promise.is_visible()
        page.get_by_label("Stop early").check()
        page.locator(".promise", has_text="at most 2 % of all answers").wait_for()
        assert "all 6 steps (confidence 95 %)" in promise.text_content()
        page.get_by_label("Steps", exact=True).fill("5")
        page.locator(".promise", has_text="Not calibrated for this setting").wait_for()
    calibrated.classifier.bias.data[0] += 1
    with pytest.raises(ValueError, match="calibrated for other weights"):
        make_payload(calibrated, title="T", class_names=[str(k) for k in range(10)])


def test_drawing_is_read_while_it_is_drawn(browser, address, model):
    with visited(browser, address, reduced_motion="reduce") as page:
        box = page.locator(".picture").bounding_box()
        at = lambda x, y: (box["x"] + x * box["width"], box["y"] + y * box["height"])  # noqa: E731
        page.mouse.move(*at(0.5, 0.2))
        page.mouse.down()
        page.mouse.move(*at(0.5, 0.5), steps=4)
        during = page.evaluate(f"Array.from({PIXELS})")
        page.mouse.move(*at(0.5, 0.8), steps=4)
        page.mouse.up()
        page.get_by_role("img", name="Your drawing").wait_for()
        drawn = np.array(page.evaluate(f"Array.from({PIXELS})")).reshape(8, 8)
        assert sum(during) > 0
        assert drawn[:, 3:5].mean() > 100  # an upright stroke fills the height, in the middle, wherever it was drawn
        assert drawn[:, [0, 1, 6, 7]].max() == 0
        page.wait_for_timeout(300)
        assert answer_of(page) == torch_answer(model, page)
        assert page.locator(".examples [aria-pressed=true]").count() == 0
        page.get_by_role("button", name="Clear").click()
        assert max(page.evaluate(f"Array.from({PIXELS})")) == 0


def picture(array) -> str:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


DROP = """([data, name, type, kind]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type }));
  const init = { bubbles: true, cancelable: true };
  if (kind === "paste") document.dispatchEvent(new ClipboardEvent("paste", { ...init, clipboardData: transfer }));
  else document.querySelector(".live").dispatchEvent(new DragEvent("drop", { ...init, dataTransfer: transfer }));
}"""


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_images_are_dropped_and_pasted(browser, address, model, kind):
    image = np.zeros((64, 96, 3), np.uint8)  # a bright bar in the middle square, another outside of it
    image[8:56, 44:52], image[:, :8] = 255, 255
    with visited(browser, address, reduced_motion="reduce") as page:
        page.evaluate(DROP, [picture(image), f"{EVIL}.png", "image/png", kind])
        page.get_by_role("img", name="Your image").wait_for()
        seen = np.array(page.evaluate(f"Array.from({PIXELS})")).reshape(8, 8)
        wanted = image[:, 16:80, 0].reshape(8, 8, 8, 8).mean(axis=(1, 3))  # each pixel the mean of its own 8×8
        assert np.abs(seen - wanted).mean() < 8
        assert seen[3, 3:5].min() > 90
        page.wait_for_timeout(300)
        assert answer_of(page) == torch_answer(model, page)


def test_dark_on_light_is_inverted_and_no_image_is_said(browser, address):
    paper = np.full((40, 40), 255, np.uint8)
    paper[8:32, 18:22] = 0
    with visited(browser, address, reduced_motion="reduce") as page:
        page.locator("input[type=file]").set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": base64.b64decode(picture(paper))}
        )
        page.locator(".status", has_text="was inverted").wait_for()
        seen = np.array(page.evaluate(f"Array.from({PIXELS})")).reshape(8, 8)
        assert seen[0].max() < 30
        assert seen[4, 3:5].max() > 100
        page.evaluate(DROP, [base64.b64encode(b"no image at all").decode(), "x.png", "image/png", "drop"])
        page.locator(".status", has_text="no image that the browser can read").wait_for()


def test_hostile_names_stay_text_and_nothing_can_be_asked_of_the_network(browser, tmp_path, model):
    images = torch.zeros(10, 1, 8, 8, dtype=torch.uint8)
    payload = make_payload(
        model, title=EVIL, class_names=[f"{k} {EVIL}" for k in range(10)], images=images, labels=torch.arange(10)
    )
    page_file = write_page(payload, tmp_path / "page.html")
    text = page_file.read_text()
    assert "<img src=x" not in text
    assert json.loads(re.search(r'json" class="payload">(.*?)</script>', text).group(1))["title"] == EVIL
    findings, folder = [Finding("a/b", EVIL, EVIL, EVIL)], tmp_path / EVIL.replace("/", "")
    report = write_report(findings, folder, title=EVIL, command=EVIL, meta={EVIL: EVIL}, opening=live(payload))
    attempt = """async () => {
      const failed = [];
      await fetch("https://example.org/").catch(() => failed.push("fetch"));
      await new Promise((done) => Object.assign(new Image(), { src: "https://example.org/a.png", onerror: done }));
      failed.push("image");
      const script = document.createElement("script");
      script.textContent = "window.injected = 1";
      document.body.append(script);
      document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.injected = 2'>");
      await new Promise((done) => setTimeout(done, 100));
      return [failed, window.injected ?? 0];
    }"""
    for file in (page_file, report):
        page = browser.new_page(reduced_motion="reduce")
        asked, blocked, dialogs = [], [], []
        page.on("request", lambda r, seen=asked: r.url.startswith("http") and seen.append(r.url))
        page.on(
            "requestfailed",
            lambda r, seen=blocked: r.failure == "csp" and r.url.startswith("http") and seen.append(r.url),
        )
        page.on("dialog", lambda dialog, seen=dialogs: (seen.append(dialog.message), dialog.dismiss()))
        page.goto(file.as_uri())
        page.locator(".live .status:not(:empty)").wait_for(state="attached")
        assert page.locator("img[src=x]").count() == 0
        assert asked == []
        assert EVIL[:20] in page.locator(".bars").inner_text()
        assert page.evaluate(attempt) == [["fetch", "image"], 0]
        page.close()
        assert dialogs == []
        assert asked == blocked  # the policy stopped them before they left


def test_a_report_begins_with_the_live_page(browser, tmp_path, payload, model):
    findings = [Finding("a/b", 1, "T", "Text.", headline="A sentence.")]
    path = write_report(findings, tmp_path, title="A flow", command="odevit quickstart", meta={}, opening=live(payload))
    for size in (DESKTOP, PHONE):
        with visited(browser, path, size=size, reduced_motion="reduce") as page:
            assert page.evaluate("document.documentElement.scrollWidth") == size[0]
            order = [page.locator(name).first.bounding_box()["y"] for name in ("h1", ".picture", ".lede", "section#a")]
            assert order == sorted(order)
            assert order[1] < size[1] / 3  # a picture on the first screen
            assert answer_of(page) == torch_answer(model, page)


def test_a_class_name_covers_no_neighbours_point(browser, payload, tmp_path):
    """Two means beside each other: the left one's name stands to its left, all others to the right."""
    near = copy.deepcopy(payload)
    (_, x, y), *_ = near["plane"]["classes"]
    near["plane"]["classes"] = [[0, x, y], [1, x + 0.1, y], *([k, x, y + 0.1 * k] for k in range(2, 10))]
    with visited(browser, write_page(near, tmp_path / "page.html")) as page:
        sides = page.locator(".plane text").evaluate_all(
            "all => all.map((t) => [t.textContent, t.getAttribute('text-anchor')])"
        )
    assert sides == [["the 0", "end"], *([f"the {k}", "start"] for k in range(1, 10))]


def test_the_page_holds_the_weights_in_half_precision(payload, model):
    numbers = np.frombuffer(base64.b64decode(payload["data"]), "<f2")
    start, length = payload["weights"]["fields.0.mlp.w1.weight"]
    wanted = half_precision(model).odevit.fields[0].mlp.w1.weight.detach().flatten().numpy()
    assert np.array_equal(numbers[start : start + length], wanted)
    assert len(numbers) == payload["parameters"]


def test_a_page_without_a_folder_is_refused(payload, tmp_path):
    with pytest.raises(ValueError, match=r"folder must exist"):
        write_page(payload, tmp_path / "none" / "page.html")
