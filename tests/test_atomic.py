"""A file is there whole or not at all."""

import os
from pathlib import Path

import pytest

from odevit.atomic import filled_folder, write_file


def test_the_old_file_stays_when_writing_fails(tmp_path, monkeypatch):
    target = tmp_path / "result.json"
    write_file(target, "old")
    assert target.stat().st_mode & 0o777 == 0o644

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_file_takes_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    target, seen = tmp_path / "report.html", []
    replace = os.replace

    def spy(source, goal):
        seen.append(Path(source).read_text(encoding="utf-8"))
        replace(source, goal)

    monkeypatch.setattr(os, "replace", spy)
    write_file(target, "Ωhm" * 1000)
    assert seen == ["Ωhm" * 1000] == [target.read_text(encoding="utf-8")]


def test_the_folder_one_stands_in_can_be_filled(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    with filled_folder(Path("."), "last") as folder:
        (folder / "last").write_text("here")
    assert (home / "last").read_text() == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
