"""`odevit quickstart` with a few steps: the verbs in order, and all that it says it has written."""

import json

import pytest

from odevit.commands.quickstart import quickstart


@pytest.mark.usefixtures("brief")
def test_quickstart_runs_the_verbs_and_says_what_it_wrote(tmp_path, capsys, monkeypatch):
    few = ["comparison", "contraction", "robustness"]  # test_readme.py runs it whole
    monkeypatch.setattr("odevit.commands.analyze.load_analyses", lambda: few)
    monkeypatch.setattr("odevit.commands.distill.MOST_IMAGES", 160)
    path = quickstart(tmp_path, quick=True)
    assert path == tmp_path / "report.html"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["command"], report["title"]) == ("odevit quickstart", "A Vision Transformer turned into a flow")
    assert {"comparison/side_by_side", "contraction/agreement", "robustness/verdict"} <= set(report["values"])
    for name in ("teacher/result.json", "student/comparison.json", "student/model/config.json", "quickstart.png"):
        assert (tmp_path / name).exists(), name
    output = capsys.readouterr().out
    assert "Side by side on" in output
    assert "Picture:" in output
