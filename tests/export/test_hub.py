"""The folder for the hub works in a process that has no odevit."""

import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image
from problems import perturbed_model
from transformers import AutoModelForImageClassification

from odevit import OdeViTForImageClassification
from odevit.export.hub import remote_code, write_hub_folder

SCRIPT = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("odevit", "torchdiffeq", "timm"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, pipeline
folder, image = sys.argv[1:]
answers = pipeline("image-classification", model=folder, trust_remote_code=True)(image)
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
steps = AutoConfig.from_pretrained(folder, trust_remote_code=True, num_steps=9).num_steps
again = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True, image_size=24)
assert not any(name.split(".")[0] == "odevit" for name in sys.modules)
print(json.dumps({"answers": answers, "class": type(model).__module__, "base": type(base).__name__, "steps": steps,
                  "positions": list(again.odevit.positions.shape)}))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "flow-of-five"
    model = perturbed_model(
        tokenizer="conv", mixing="depthwise", pool="sequence", num_fields=2, spectral_cap=0.7,
        id2label={i: f"class {i}" for i in range(5)}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25],
    )  # fmt: skip
    write_hub_folder(model, folder)
    return model, folder


def test_it_works_in_a_process_without_odevit(saved, tmp_path):
    model, folder = saved
    picture = Image.effect_mandelbrot((40, 30), (-2, -1, 1, 1), 20).convert("RGB")
    picture.save(tmp_path / "image.png")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-I", "-c", SCRIPT, folder, tmp_path / "image.png"]
    finished = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    output = json.loads(finished.stdout.splitlines()[-1])
    with torch.no_grad():
        scores = model(model.image_processor()(picture, return_tensors="pt").pixel_values).logits.softmax(-1)[0]
    for answer in output["answers"]:
        assert answer["score"] == pytest.approx(float(scores[int(answer["label"][-1])]), abs=1e-5)
    assert output["class"].startswith("transformers_modules.")
    assert output["base"] == "OdeViTModel"
    assert output["steps"] == 9
    assert output["positions"] == [1, 37, 32]


def test_with_odevit_installed_the_package_is_used(saved):
    model = AutoModelForImageClassification.from_pretrained(saved[1])
    assert type(model) is OdeViTForImageClassification


def test_the_code_is_the_packages_own_without_a_trace_of_odevit():
    code = remote_code()
    assert {"configuration_odevit", "modeling_odevit", "image_processing_odevit", "solvers_odevit"} <= set(code)
    for name, source in code.items():
        compile(source, name, "exec")
        assert "import odevit" not in source
        assert "from odevit" not in source
        assert ".register(" not in source.replace("def register(", "")
    assert "def from_teacher" not in code["modeling_odevit"]
    assert "def classify" in code["modeling_odevit"]


def test_the_card_says_what_is_known_and_no_more(saved):
    card = (saved[1] / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-classification\nlicense: apache-2.0\n")
    assert f"{saved[0].num_parameters():,} parameters; euler with 4 steps" in card
    assert "class 0, class 1, class 2, class 3, class 4" in card
    assert "# flow-of-five" in card
