import errno
import json
import random

import numpy as np
import pytest
import torch

from odevit.training.checkpoint import (
    FREE_KEYS,
    CheckpointError,
    CheckpointStore,
    check_same_recipe,
    library_versions,
    random_state,
    recover_folders,
    set_random_state,
    write_folder,
)


def test_store_keeps_the_newest_and_gives_back_what_it_took(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.load() is None
    for step in (5, 10, 100):
        store.save(step, {"weight": torch.full((3,), float(step)), "random": [random_state()]}, {"note": "é"})
    assert [path.name for path in store.paths()] == ["step-00000010", "step-00000100"]
    state, meta = store.load()
    assert torch.equal(state["weight"], torch.full((3,), 100.0))
    assert (meta["step"], meta["note"]) == (100, "é")


@pytest.mark.parametrize("damage", ["bit", "truncated", "meta", "meta value", "no state", "newer"])
def test_damaged_checkpoint_is_named_and_passed_over(damage, tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        store.save(step, {"weight": torch.arange(100.0)}, {})
    path = tmp_path / "step-00000002"
    content = (path / "state.safetensors").read_bytes()
    if damage == "bit":
        middle = len(content) // 2
        (path / "state.safetensors").write_bytes(
            content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        )
    elif damage == "truncated":
        (path / "state.safetensors").write_bytes(content[:-100])
    elif damage == "meta":
        (path / "meta.json").write_text("{")
    elif damage == "meta value":
        (path / "meta.json").write_text((path / "meta.json").read_text().replace('"step": 2', '"step": 3'))
    elif damage == "no state":
        (path / "state.safetensors").unlink()
    else:
        (path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.warns(UserWarning, match="step-00000002"):
        _, meta = store.load()
    assert meta["step"] == 1
    store.drop_after(1)
    assert [p.name for p in store.paths()] == ["step-00000001"]


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {}, {})
    (tmp_path / "step-00000001" / "meta.json").write_text("")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        store.load()


def test_failed_write_leaves_what_was_there(tmp_path):
    target = tmp_path / "best"
    write_folder(target, lambda folder: (folder / "a").write_text("old"))

    def fail(folder):
        (folder / "a").write_text("new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write_folder(target, fail)
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    write_folder(target, lambda folder: (folder / "b").write_text("new"))
    assert [path.name for path in target.iterdir()] == ["b"]


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr("odevit.training.checkpoint.sync", lambda path: events.append(("sync", path.name)))
    monkeypatch.setattr("odevit.training.checkpoint.os.replace", lambda old, new: events.append(("rename", new.name)))

    def write(folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")

    write_folder(tmp_path / "target", write)
    renamed = events.index(("rename", "target"))
    assert {name for _, name in events[:renamed]} == {"file", "sub", ".tmp-target"}
    assert events[renamed + 1 :] == [("sync", tmp_path.name)]


def test_recovery_after_a_kill(tmp_path):
    for name in (".tmp-step-1", ".previous-best", ".previous-model", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "from").write_text(name)
    (tmp_path / ".tmp-result.json").write_text("{")
    recover_folders(tmp_path)
    assert {path.name: (path / "from").read_text() for path in tmp_path.iterdir()} == {
        "best": ".previous-best",  # had been moved away, its successor never arrived
        "model": "model",
    }


def test_random_state_round_trip(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(2).tolist(), random.gauss(0, 1)  # noqa: NPY002

    random.gauss(0, 1)  # leaves a second number waiting in the state
    store = CheckpointStore(tmp_path, keep=1)
    store.save(0, {"random": random_state()}, {})
    expected = draw()
    draw()
    set_random_state(store.load()[0]["random"])
    assert draw() == expected


def test_recipe_differences_are_all_named():
    saved = {"seed": 0, "optim": {"lr": 1.0, "steps": 5}, "model": {"depth": 6}}
    check_same_recipe(saved, {"seed": 0, "optim": {"lr": 1.0, "minutes": 2}, "model": {"depth": 6}})
    with pytest.raises(ValueError, match=r"(?s)model\.depth: 6 in the run, 12 now.*optim\.lr") as caught:
        check_same_recipe(saved, {"seed": 0, "optim": {"lr": 2.0, "steps": 5}, "model": {"depth": 12}})
    assert "seed" not in str(caught.value)


def test_free_keys_exist(tmp_path):
    from tiny_runs import tiny_recipe

    from odevit.training.checkpoint import _flatten

    own = {key for key in FREE_KEYS if not key.startswith("distill.")}  # the task's own keys are tested with it
    assert _flatten(tiny_recipe(tmp_path).to_dict()).keys() >= own


def test_versions_are_those_installed():
    assert library_versions()["torch"] == torch.__version__
