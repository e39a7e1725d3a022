"""Names with markup stay text: whatever classes, titles and paths are called, both files have the same elements."""

from html.parser import HTMLParser

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.analysis import Finding
from odevit.analysis.report import write_report
from odevit.export.graphs import metadata
from odevit.page import live, make_payload, write_page

PIECES = ["<script>", "</script>", "<!--", "-->", '"', "'", "&", "&lt;", "<img src=x onerror=a>", "]]>", "javascript:"]
PIECES += ["</title>", "</style>", "\\u003c", "${title}", "$policy", "\x00", "\u2028", "`", "=", " ", "x", "é"]
NAMES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
EVIL = "</title></script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&$title"


class Elements(HTMLParser):
    """Tags with the names of their attributes, and the policies."""

    def __init__(self, text):
        super().__init__()
        self.found, self.policies = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag != "span" or attributes:  # the report puts a bare one around the options of a command
            self.found.append((tag, *(name for name, _ in attributes)))
        values = dict(attributes)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(values["content"])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8, "num_attention_heads": 2}
    means = {"image_mean": [0.5], "image_std": [0.5]}
    return OdeViTForImageClassification(OdeViTConfig(**sizes, **means, mlp_ratio=1, depth=1, num_steps=2, num_labels=3))


def written(model, name, folder):
    """The text of a page and of a report in which everything that a user may name is called `name`."""
    payload = make_payload(model, title=name, class_names=[f"{k} {name}" for k in range(3)])
    page = write_page(payload, folder / "page.html").read_text()
    findings = [Finding("a/b", {name: {name: name}}, name, name, headline=name, key_numbers={name: name})]
    opening = live(payload)
    report = write_report(findings, folder, title=name, command=name, meta={name: name}, opening=opening)
    return page, report.read_text()


@pytest.fixture(scope="module")
def harmless(model, tmp_path_factory):
    return [Elements(text).found for text in written(model, "name", tmp_path_factory.mktemp("harmless"))]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
@pytest.mark.slow
def test_names_are_text(name, model, harmless, tmp_path):
    assert [Elements(text).found for text in written(model, name, tmp_path)] == harmless


def test_both_files_forbid_every_request(model, tmp_path):
    for text in written(model, EVIL, tmp_path):
        (policy,) = Elements(text).policies
        assert text.index("Content-Security-Policy") < min(text.index("<style"), text.index("<script"))
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert "unsafe" not in rules["script-src"]
        assert not any("http" in rule or "*" in rule for rule in rules.values())
    assert Elements("<p><script>").found != Elements("<p>").found  # the comparison can fail


def test_metadata_of_an_exported_graph_holds_names_as_json(model):
    import copy
    import json

    named = copy.deepcopy(model)
    named.config.id2label = dict(enumerate([EVIL, "\ud83d\ude00 \u2028\n", '\\"']))
    assert json.loads(metadata(named, 2, "euler")["labels"]) == list(named.config.id2label.values())
