"""Files that a user can hand to odevit, each with the way it is read: `try_case` spoils one and says how that ended.

same        the answer of the good file
other       another answer: the spoilt file is a valid one that says something else (a weight's bit, a number of steps)
refused     a ValueError, OSError or ArithmeticError raised by odevit itself, so one sentence that names what is wrong
raw         an exception from inside a library, or one of another kind                                  (must not be)
slow        more than `SECONDS`                                                                         (must not be)
died        the process ended, by memory or a crash                                                     (must not be)
escaped     a process started, a connection opened, a class unpickled or a file written elsewhere       (must not be)
"""

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import torch

SECONDS = 20
MEMORY = 3 << 30  # bytes that reading one file may take beyond what torch and transformers take
OUTCOMES = ("same", "other", "refused", "raw", "slow", "died", "escaped")
GOOD = ("same", "other", "refused")
WATCHED = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
}


class Target(NamedTuple):
    """A file (glob) of a prepared folder, how it is spoilt, and how it is read: folder → something comparable."""

    file: str
    spoil: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], Any]
    verified: bool = False  # whether a checksum should notice every change, so that `other` must not be


# --- good files -------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """One good file of each kind, tiny."""
    from PIL import Image

    from odevit import OdeViTConfig, OdeViTForImageClassification
    from odevit.dynamics.calibration import calibrate_model
    from odevit.teachers.teacher import tiny_teacher
    from odevit.training.classifiers import save_classifier

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2)
    config = OdeViTConfig(**sizes, mlp_ratio=1, depth=1, num_steps=2, num_labels=3, image_mean=[0.5], image_std=[0.5])
    model = OdeViTForImageClassification(config).eval()
    model.config.halting = calibrate_model(model, torch.randn(60, 1, 8, 8), alpha=0.2, delta=0.2)
    for name in ("config.json", "preprocessor_config.json", "model.safetensors", "calibration"):
        save_classifier(model, folder / name)
    vit = tiny_teacher("vit", image_size=8, patch_size=4, num_labels=3).module
    vit.config.image_mean, vit.config.image_std = [0.5] * 3, [0.5] * 3
    for name in ("ViT config.json", "ViT preprocessor_config.json", "teacher config.json", "teacher weights"):
        save_classifier(vit, folder / name)
    generator = random.Random(0)
    pixels = Image.frombytes("RGB", (24, 16), generator.randbytes(24 * 16 * 3))
    for suffix in ("png", "jpg", "gif", "webp", "bmp", "tiff", "ppm"):
        (folder / f"image {suffix}").mkdir()
        pixels.save(folder / f"image {suffix}" / f"image.{suffix}")
    _prepare_runs(folder)


def _prepare_runs(folder: Path) -> None:
    import datasets
    from PIL import Image
    from tiny_runs import stateful_recipe

    (folder / "recipe").mkdir()
    (folder / "recipe" / "recipe.yaml").write_text(stateful_recipe(folder / "run").to_yaml())
    for name in ("checkpoint meta", "checkpoint state"):
        _store(folder / name).save(5, _state(), {"note": "good", "grouping": 2, "window": {"loss": 0.1}})
    for name in ("cache meta", "cache states", "cache labels"):
        _open_cache(folder / name)
    images = [Image.new("L", (8, 8), 20 * i) for i in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": _png(image), "path": None} for image in images], "label": [i % 2 for i in range(12)]}
    (folder / "parquet").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "parquet" / "train.parquet")


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _store(folder: Path) -> Any:
    from odevit.training.checkpoint import CheckpointStore

    return CheckpointStore(folder, keep=2)


def _state() -> dict[str, Any]:
    weights = torch.arange(60.0).reshape(3, 20)
    return {"model": {"weight": weights}, "average": {}, "optimizers": [{"state": {0: {"step": torch.tensor(3.0)}}}]}


# --- how they are read ------------------------------------------------------------------------------------------------


def _read_classifier(folder: Path) -> Any:
    from odevit.training.classifiers import load_classifier

    model = load_classifier(str(folder))
    config = model.config
    images = torch.linspace(0, 1, config.num_channels * config.image_size**2)
    with torch.no_grad():
        logits = model(images.reshape(1, config.num_channels, config.image_size, config.image_size)).logits
    assert bool(torch.isfinite(logits).all()), "silent NaN"
    return logits.tolist(), {index: str(name) for index, name in config.id2label.items()}


def _read_prediction(folder: Path) -> Any:
    from odevit.commands.predict import predictions
    from odevit.training.classifiers import load_classifier

    image = folder / "image.png"
    image.write_bytes(PICTURE)
    (answer,) = predictions(load_classifier(str(folder)), [str(image)], {})
    if answer.error is not None:
        raise ValueError(answer.error)
    return answer.answers


def _read_calibration(folder: Path) -> Any:
    from odevit.training.classifiers import load_odevit

    with torch.no_grad():
        out = load_odevit(str(folder))(torch.linspace(0, 1, 64).reshape(1, 1, 8, 8), halting="calibrated")
    return out.logits.tolist(), out.steps.tolist()


def _read_teacher(folder: Path) -> Any:
    from odevit.teachers.teacher import load_teacher

    teacher = load_teacher(str(folder))
    trace = teacher.trace(torch.linspace(0, 1, 192).reshape(1, 3, 8, 8))
    return [state.tolist() for state in trace.states]


def _read_recipe(folder: Path) -> Any:
    from odevit.recipe import Recipe
    from odevit.training.classifiers import build_classifier

    recipe = Recipe.load(folder / "recipe.yaml")
    build_classifier(recipe.model, _digits(), recipe.data)
    values = recipe.to_dict()
    return values


def _digits() -> Any:
    from odevit.data import DataConfig, load_data

    if "digits" not in KEPT:
        KEPT["digits"] = load_data(DataConfig(name="digits", limit=32))
    return KEPT["digits"]


def _read_checkpoint(folder: Path) -> Any:
    state, meta = _store(folder).load()
    return state["model"]["weight"].tolist(), meta


def _open_cache(folder: Path) -> Any:
    from odevit.data.augment import AugmentConfig
    from odevit.data.splits import MemorySplit
    from odevit.distill.cache import open_cache
    from odevit.distill.cache_key import Transform
    from odevit.teachers.teacher import tiny_teacher

    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1)
    pixels = torch.arange(12 * 64, dtype=torch.uint8).reshape(12, 1, 8, 8)
    transform = Transform(image_size=8, mean=(0.5,), std=(0.5,), augment=AugmentConfig())
    return open_cache(folder, teacher, MemorySplit(pixels, torch.arange(12) % 10, []), transform, say=lambda text: None)


def _read_cache(folder: Path) -> Any:
    cache = _open_cache(folder)
    trace = cache.trace(torch.arange(12))
    return [state.tolist() for state in trace.states], trace.logits.tolist(), cache.split.labels.tolist()


def _read_parquet(folder: Path) -> Any:
    from odevit.data import DataConfig, load_data

    data = load_data(DataConfig(name=str(folder / "train.parquet"), workers=0))
    images, labels = data.train.fetch(torch.arange(len(data.train)))
    return images.tolist(), labels.tolist(), data.class_names


def _read_image(folder: Path) -> Any:
    from odevit.data.decode import Frame, read_image

    (file,) = [path for path in folder.iterdir() if path.name.startswith("image.")] or [folder / "image.png"]
    return read_image(str(file), 3, Frame.middle(8)).tolist()


KEPT: dict[str, Any] = {}
PICTURE = b""


def _halting_only(good: bytes, draw: random.Random) -> bytes:
    config = json.loads(good)
    return json.dumps({**config, **hostile.changed({"halting": config["halting"]}, draw)}).encode(
        "utf-8", "surrogatepass"
    )


TARGETS: dict[str, Target] = {
    "config.json": Target("config.json", hostile.bad_json, _read_classifier),
    "preprocessor_config.json": Target("preprocessor_config.json", hostile.bad_json, _read_prediction),
    "model.safetensors": Target("model.safetensors", hostile.bad_safetensors, _read_classifier),
    "calibration": Target("config.json", _halting_only, _read_calibration),
    "ViT config.json": Target("config.json", hostile.bad_json, _read_classifier),
    "ViT preprocessor_config.json": Target("preprocessor_config.json", hostile.bad_json, _read_prediction),
    "teacher config.json": Target("config.json", hostile.bad_json, _read_teacher),
    "teacher weights": Target("model.safetensors", hostile.bad_safetensors, _read_teacher),
    "recipe": Target("recipe.yaml", hostile.bad_yaml, _read_recipe),
    "checkpoint meta": Target("step-00000005/meta.json", hostile.bad_json, _read_checkpoint, verified=True),
    "checkpoint state": Target("step-00000005/state.safetensors", hostile.bad_safetensors, _read_checkpoint, True),
    "cache meta": Target("*/meta.json", hostile.bad_json, _read_cache),
    "cache states": Target("*/states.npy", hostile.bad_image, _read_cache),
    "cache labels": Target("*/labels.npy", hostile.bad_image, _read_cache),
    "parquet": Target("train.parquet", hostile.bad_bytes, _read_parquet),
    **{
        f"image {suffix}": Target(f"image.{suffix}", hostile.bad_image, _read_image)
        for suffix in ("png", "jpg", "gif", "webp", "bmp", "tiff", "ppm")
    },
}


# --- one case, and many in a child ------------------------------------------------------------------------------------


class TooSlowError(BaseException):
    pass


def ours(error: BaseException) -> bool:
    """Whether it was raised in odevit's own code, is of a kind that the command line prints as one sentence, and says
    something."""
    frames = traceback.extract_tb(error.__traceback__)
    innermost = frames[-1].filename if frames else ""
    kinds = (ValueError, OSError, ArithmeticError)
    return isinstance(error, kinds) and ("/odevit/" in innermost or __file__ == innermost) and len(str(error)) > 10


def try_case(name: str, number: int, good: Path, work: Path, expected: Any) -> tuple[str, str]:
    """(outcome, what was said) of one spoilt file."""
    target, folder = TARGETS[name], work / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good / name, folder)
    draw = random.Random(f"{name} {number}")
    hostile.spoil(next(folder.glob(target.file)), target.spoil, draw)
    ESCAPES.clear()
    signal.alarm(SECONDS)
    began = time.monotonic()
    try:
        answer = target.read(folder)
        outcome, said = ("same", "") if repr(answer) == repr(expected) else ("other", "")
    except TooSlowError:
        outcome, said = "slow", ""
    except Exception as error:
        outcome = "refused" if ours(error) else "raw"
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:300]} [{innermost.filename}:{innermost.lineno}]"
    finally:
        signal.alarm(0)
    if time.monotonic() - began > SECONDS:
        outcome = "slow"
    if ESCAPES:
        outcome, said = "escaped", f"{ESCAPES[0]} {said}"
    return outcome, said


ESCAPES: list[str] = []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _watch(work: Path) -> None:
    """Note every started process, connection, unpickled class, and file opened for writing outside `work`."""
    places = [str(work), "/dev/null", "/proc/self"]

    def hook(event: str, arguments: tuple) -> None:
        if event in WATCHED:
            ESCAPES.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & WRITING:
            path = os.path.abspath(arguments[0])
            if not path.startswith(tuple(places)):
                ESCAPES.append(f"write {path}")

    sys.addaudithook(hook)


def run_cases(names: Iterable[str], numbers: dict[str, list[int]], good: Path, work: Path, log: Path) -> None:
    """In a child: the cases one after the other, a line in `log` before and after each."""
    global PICTURE
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TMPDIR": str(work), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")}
    import datasets

    datasets.config.HF_DATASETS_CACHE = str(work / "datasets")
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore")
    PICTURE = (good / "image png" / "image.png").read_bytes()
    expected: dict[str, Any] = {}
    for name in names:
        shutil.copytree(good / name, work / name, dirs_exist_ok=True)
        expected[name] = TARGETS[name].read(work / name)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def too_slow(*_: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, too_slow)
    _watch(work)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the child ends)
    for name in names:
        for number in numbers[name]:
            os.write(descriptor, (json.dumps([name, number]) + "\n").encode())
            outcome, said = try_case(name, number, good, work, expected[name])
            os.write(descriptor, (json.dumps([name, number, outcome, said]) + "\n").encode())


def run(counts: dict[str, int], folder: Path, start: int = 0) -> list[tuple[str, int, str, str]]:
    """(target, number, outcome, what was said) of every case; a child that dies or hangs costs one case."""
    from child_processes import start_child

    prepare(folder / "good")
    numbers = {name: list(range(start, start + count)) for name, count in counts.items()}
    results: list[tuple[str, int, str, str]] = []
    attempt = 0
    while any(numbers.values()):
        log = folder / f"log-{attempt}"
        left = {name: cases for name, cases in numbers.items() if cases}
        child = start_child(run_cases, list(left), left, folder / "good", folder / f"work-{attempt}", log)
        size, since = -1, time.monotonic()
        while child.is_alive():
            child.join(0.2)
            now = log.stat().st_size if log.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif now and time.monotonic() - since > 3 * SECONDS:  # deaf to its alarm
                child.kill()
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert lines, f"reading the good files failed (exit code {child.exitcode})"
        results += [tuple(line) for line in lines if len(line) == 4]
        if len(lines[-1]) == 2:
            results.append((*lines[-1], "slow" if time.monotonic() - since > 3 * SECONDS else "died", "no word"))
        done = {(name, number) for name, number, *_ in results}
        numbers = {name: [n for n in cases if (name, n) not in done] for name, cases in numbers.items()}
        shutil.rmtree(folder / f"work-{attempt}", ignore_errors=True)
        attempt += 1
    return results
