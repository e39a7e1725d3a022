"""Spoilt files: a right answer or one sentence, in time, in memory, and nothing is run. `make torture` tries 10,000."""

import contextlib
import hashlib
import json
import os
import pickle
import shutil

import corruption
import handed
import numpy as np
import pytest
import torch

from odevit.teachers.teacher import load_teacher
from odevit.training.checkpoint import CheckpointError, CheckpointStore
from odevit.training.classifiers import load_classifier

EACH = 10


@pytest.mark.slow
def test_spoilt_files_are_refused_in_one_sentence(tmp_path):
    results = corruption.run(dict.fromkeys(corruption.TARGETS, EACH), tmp_path)
    assert len(results) == EACH * len(corruption.TARGETS)
    assert [case for case in results if case[2] not in corruption.GOOD] == []
    assert [case for case in results if case[2] == "other" and corruption.TARGETS[case[0]].verified] == []
    assert sum(case[2] == "refused" for case in results) > len(results) / 4  # the files are spoilt indeed


def test_the_watch_sees_what_it_should(tmp_path):
    """A reader that runs a command, and one that fails inside a library, are told from a good one."""
    error = ValueError("a sentence of more than ten letters")
    assert not corruption.ours(error)  # never raised: no frame of odevit
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert not corruption.ours(caught.value)
    with pytest.raises(ValueError, match="unknown model") as caught:
        load_classifier(str(tmp_path / "nowhere"))
    assert corruption.ours(caught.value)


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    handed.prepare(folder)
    return folder


WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.bin", "tf_model.h5", "pytorch_model.bin.index.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("folder", ["model.safetensors", "teacher weights"])
@pytest.mark.parametrize("by", ["pickle", "torch"])
def test_a_pickle_in_the_place_of_weights_is_never_loaded(name, folder, by, good, tmp_path):
    bomb, place = Bomb(tmp_path / "ran"), tmp_path / "model"
    shutil.copytree(good / folder, place)
    (place / "model.safetensors").unlink()
    if by == "pickle":
        (place / name).write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"weight": bomb}, place / name)
    for read in (load_classifier, load_teacher):
        with pytest.raises((ValueError, OSError)):
            read(str(place))
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(bomb))
    assert (tmp_path / "ran").exists()  # the bomb is live


@pytest.mark.parametrize("file", ["state.safetensors", "state.pt", "meta.json"])
def test_a_pickle_in_a_checkpoint_is_never_loaded(file, good, tmp_path):
    shutil.copytree(good / "checkpoint state", tmp_path / "checkpoints")
    step = tmp_path / "checkpoints" / "step-00000005"
    torch.save({"model": Bomb(tmp_path / "ran")}, step / file)
    if file == "state.pt":  # as an attacker would: format 1, with the right hash
        digest = hashlib.sha256((step / file).read_bytes()).hexdigest()
        (step / "meta.json").write_text(json.dumps({"format": 1, "step": 5, "sha256": digest}))
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError):
        CheckpointStore(tmp_path / "checkpoints", 2).load()
    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_a_cache_is_never_loaded(good, tmp_path):
    shutil.copytree(good / "cache states", tmp_path / "cache")
    states = next((tmp_path / "cache").glob("*/states.npy"))
    np.save(states, np.array([Bomb(tmp_path / "ran")], dtype=object), allow_pickle=True)
    handed._read_cache(tmp_path / "cache")  # written anew
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_is_never_run(good, tmp_path):
    """auto_map without trust: the code of the folder is not imported, whatever the class that it names."""
    place = tmp_path / "model"
    shutil.copytree(good / "ViT config.json", place)
    config = json.loads((place / "config.json").read_text())
    (place / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.A", "AutoModelForImageClassification": "evil.B"}}
    (place / "config.json").write_text(json.dumps(config))
    for read in (load_classifier, load_teacher):
        with pytest.raises(ValueError, match="cannot be read"):
            read(str(place))
    assert not (tmp_path / "ran").exists()


HUB = "kernels-community/flash-attn"
TRUSTED = [("_attn_implementation", HUB, "one of eager"), ("attn_implementation", HUB, "one of eager")]
TRUSTED += [
    ("num_hidden_layers", 10**400, "at most 10,000"),
    ("num_labels", 10**7, "at most 1,000,000"),
]


@pytest.mark.parametrize(("key", "value", "message"), TRUSTED)
def test_a_config_names_no_code_of_the_hub_and_no_endless_work(key, value, message, good, tmp_path):
    place = tmp_path / "model"
    shutil.copytree(good / "ViT config.json", place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {key: value}))
    for read in (load_classifier, load_teacher):
        with pytest.raises(ValueError, match=f"must be {message}"):
            read(str(place))


@pytest.mark.parametrize("name", ["config.json", "checkpoint meta", "run", "image png", "image folder", "parquet"])
def test_a_pipe_is_not_waited_for(name, good, tmp_path):
    """Reading one waits until somebody writes."""
    shutil.copytree(good / name, tmp_path / name)
    file = next((tmp_path / name).glob(handed.TARGETS[name].file))
    file.unlink()
    os.mkfifo(file)
    with contextlib.suppress(ValueError, OSError):
        handed.TARGETS[name].read(tmp_path / name)
