"""The house: imports point downwards only, files stay short, tests stand where the module that they test stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "odevit"
LONGEST_FILE = 350  # lines

# From the ground up: a room may import from itself and from those above it in this list, late imports included.
FLOORS = (
    ("parse", "registry", "atomic", "words", "checksum", "shipped"),
    ("model",),
    ("dynamics",),
    ("data",),
    ("teachers",),
    ("training",),
    ("distill",),
    ("recipe",),
    ("analysis",),
    ("page", "export", "timm"),
    ("commands",),
    ("__main__", "odevit_cli"),
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

# The only imports that point upwards, each inside one function, with its reason.
UPWARDS = {
    ("model/model.py", "distill"): "OdeViTForImageClassification.from_teacher, a convenience on the class people know",
}

# Tests beside the rooms, and tests in a room that are about no single module of it.
NOT_ROOMS = {"fixtures", "reliability", "with_timm"}
ABOUT_NO_MODULE = {
    "commands/test_cli.py": "odevit_cli stands beside the package",
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def all_code() -> list[Path]:
    folders = ("src", "tests", "experiments", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room of odevit) of every import in a file, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "odevit":
                room = parts[1] if len(parts) > 1 else "model"
                yield node.lineno, room if room in FLOOR else "model"  # the package itself offers what model offers
            elif parts[0] == "odevit_cli":
                yield node.lineno, "odevit_cli"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    if path == SOURCE / "__init__.py":
        assert {room for _, room in imported_rooms(path)} <= {"model", "shipped"}
        return
    name, height = str(path.relative_to(SOURCE)), FLOOR[room_of(path)]
    for line, room in imported_rooms(path):
        if (name, room) not in UPWARDS:
            assert FLOOR[room] <= height, f"{name}:{line} imports from {room}, which stands above {room_of(path)}"


def test_the_exceptions_are_still_needed():
    for name, room in UPWARDS:
        assert room in {found for _, found in imported_rooms(SOURCE / name)}, f"{name} no longer imports {room}"


def test_every_room_has_its_floor():
    assert {room_of(path) for path in modules()} - {"__init__"} <= set(FLOOR)


def test_the_order_is_enforced(tmp_path):
    """A late import inside a function, `import a.b as c` and `from odevit import x` are all seen."""
    file = tmp_path / "module.py"
    file.write_text(
        "def f():\n    from odevit.training.loop import fit\nimport odevit.data.augment as a\nimport odevit\n"
    )
    assert sorted(imported_rooms(file)) == [(2, "training"), (3, "data"), (4, "model")]


def test_no_file_is_long():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in all_code()}
    long = {name: count for name, count in lines.items() if count > LONGEST_FILE}
    assert long == {}, "divide them by what their parts are about"


def test_tests_mirror_the_packages():
    """tests/ROOM/test_MODULE.py is about src/odevit/ROOM/MODULE; an aspect may stand before or behind its name."""
    for file in sorted((ROOT / "tests").glob("*/test_*.py")):
        room, name = file.parent.name, str(file.relative_to(ROOT / "tests"))
        if room in NOT_ROOMS or name in ABOUT_NO_MODULE:
            continue
        assert (SOURCE / room).is_dir(), f"{name}: there is no room src/odevit/{room}"
        known = {path.stem for path in (SOURCE / room).iterdir()} | {room}
        if len(list((SOURCE / room).glob("*.py"))) == 1:  # the room is one module
            continue
        words = file.stem.removeprefix("test_").split("_")
        ends = range(1, len(words) + 1)
        candidates = {"_".join(words[start:end]) for end in ends for start in range(end)}
        assert candidates & known, f"{name} is about none of {', '.join(sorted(known))}"


def test_help_does_not_import_torch():
    """The command line reads its arguments before it imports anything heavy."""
    heavy = {"torch", "transformers", "numpy", "odevit"}
    tree = ast.parse((ROOT / "src" / "odevit_cli.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not heavy & {name.split(".")[0] for name in names}


def test_no_two_test_files_share_a_name():
    """pytest imports test files by their name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
