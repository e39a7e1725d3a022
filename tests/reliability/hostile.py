"""Broken and hostile files: one good file and a seed → one bad file, always the same one."""

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEP = 100_000
LONG = "x" * 100_000
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 2**31, 2**63, -(2**63), 2**200, 10**400, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), "", "0", "nan", "float16", "os.system", LONG, "../../../etc/passwd", "/dev/zero",
    "a\0b", "\ud800", "<script>alert(1)</script>", "$(touch /tmp/owned)", "!!python/object/apply:os.system", [], {},
    [[]], [None], [1, "a", None], [0] * 1000, {"a": {"b": []}}, {"0": None}, {"": ""}, {"x": 1}, {"-1": "a"},
]  # fmt: skip

# keys that libraries give a meaning to: code to run, files to fetch, other classes to build
KEYS: dict[str, Any] = {
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForImageClassification": "evil.Evil"},
    "custom_pipelines": {"image-classification": {"impl": "evil.Evil", "pt": ["AutoModel"]}},
    "_attn_implementation": "kernels-community/flash-attn", "attn_implementation": "kernels-community/evil",
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}, "use_kernels": True,
    "architectures": ["../evil"], "torch_dtype": "system", "dtype": "nn", "model_type": "bert", "adapter": 1,
    "_name_or_path": "/dev/zero", "transformers_version": "999", "format_version": 10**6, "checkpoint_times": {},
    "num_labels": 10**7, "base_model_name_or_path": "/dev/zero", "device_map": "evil", "__class__": "x", "self": 1,
    "gguf_file": "/etc/passwd", "_commit_hash": [], "return_dict": False, "output_hidden_states": 3, "use_auth": {},
}  # fmt: skip


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a tree of dicts and lists, except the root's."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(tree: Any, draw: random.Random) -> Any:
    """One value replaced, removed, added or moved."""
    tree = copy.deepcopy(tree)
    path = draw.choice(list(places(tree)))
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    what = draw.randrange(10)
    if what < 6:
        parent[path[-1]] = draw.choice(VALUES)
    elif what == 6:
        del parent[path[-1]]
    elif what == 7:
        name = draw.choice(list(KEYS))
        tree[name] = KEYS[name]
    elif what == 8:
        old = parent[path[-1]]
        number = isinstance(old, int | float)
        parent[path[-1]] = old * draw.choice([-1, 2, 10**6, 10**12, 0.5]) if number else [old]
    else:
        parent[path[-1]] = draw.choice([{str(path[-1]): parent[path[-1]]}, str(parent[path[-1]])])
    return tree


def bad_json(good: bytes, draw: random.Random) -> bytes:
    """The values changed, or the text that holds them."""
    what = draw.randrange(12)
    if what < 8:
        return json.dumps(changed(json.loads(good), draw)).encode("utf-8", "surrogatepass")
    if what == 8:  # a key twice
        key = draw.choice(list(json.loads(good)))
        return good.rstrip()[:-1] + f', "{key}": {json.dumps(draw.choice(VALUES))}}}'.encode("utf-8", "surrogatepass")
    if what == 9:
        return draw.choice(
            [b"[" * DEEP, b'{"a":' * DEEP, b"", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"\0" * 100, b"{" + good]
        )
    return bad_bytes(good, draw)


def bad_lines(good: bytes, draw: random.Random) -> bytes:
    """One line of JSON changed, or any bytes."""
    lines = good.splitlines()
    if draw.random() < 0.3:
        return bad_bytes(good, draw)
    chosen = draw.randrange(len(lines))
    lines[chosen] = bad_json(lines[chosen], draw)
    return b"\n".join(lines) + b"\n"


def bad_yaml(good: bytes, draw: random.Random) -> bytes:
    import yaml

    what = draw.randrange(12)
    if what < 8:
        return json.dumps(changed(yaml.safe_load(good), draw)).encode("utf-8", "surrogatepass")  # JSON is YAML
    if what < 10:
        laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        )
        tricks = ["!!python/object/apply:os.system ['touch /tmp/owned']", "output: !!python/name:os.system", "[" * 5000]
        tricks += [
            laughs,
            "a: &a {b: *a}",
            "? [a]\n: 1",
            "- 1",
            "x",
            "",
            "%YAML 9.9\n---\n",
            "output: *nowhere",
            "{a: 1",
        ]
        tricks += ["1: 2\nnull: 3", "output: 2020-01-01", "data: {<<: 3}", "optim: !!binary aGk=", "&a [*a]"]
        return draw.choice(tricks).encode()
    return bad_bytes(good, draw)


def bad_bytes(good: bytes, draw: random.Random) -> bytes:
    """Flipped bits, a piece missing, doubled, zeroed or random, the end cut off or something behind it."""
    data = bytearray(good)
    if not data:
        return bytes(draw.randrange(256) for _ in range(64))
    start = draw.randrange(len(data))
    size = draw.choice([1, 2, 8, 64, 1024])
    what = draw.randrange(8)
    if what < 3:
        for _ in range(draw.choice([1, 1, 3, 20])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif what == 3:
        del data[start:]
    elif what == 4:
        del data[start : start + size]
    elif what == 5:
        data[start:start] = data[start : start + size]
    elif what == 6:
        data[start : start + size] = bytes(draw.choice([0, 255, draw.randrange(256)]) for _ in range(size))
    else:
        data += bytes(draw.randrange(256) for _ in range(size))
    return bytes(data)


def bad_safetensors(good: bytes, draw: random.Random) -> bytes:
    """The header changed as JSON (names, shapes, types, offsets), its length, or any bytes."""
    if draw.random() < 0.5:
        return bad_bytes(good, draw)
    length = int.from_bytes(good[:8], "little")
    if draw.random() < 0.2:
        return draw.choice([0, 1, length - 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + good[8:]
    header = bad_json(good[8 : 8 + length].rstrip(b" "), draw)
    return len(header).to_bytes(8, "little") + header + good[8 + length :]


def bad_image(good: bytes, draw: random.Random) -> bytes:
    """Any bytes, the ones of the header more often."""
    if draw.random() < 0.5:
        return bad_bytes(good, draw)
    data = bytearray(good)
    for _ in range(draw.choice([1, 2, 4])):
        data[draw.randrange(min(64, len(data)))] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
    return bytes(data)


def bad_place(file: Path, draw: random.Random) -> None:
    """Something else where the file should be."""
    file.unlink()
    what = draw.randrange(6)
    if what == 0:
        file.mkdir()
    elif what == 1:
        file.symlink_to(file.with_name("nowhere"))
    elif what == 2:
        file.symlink_to(file)
    elif what == 3:
        os.mkfifo(file)
    elif what == 4:
        file.symlink_to("/dev/null")
    # 5: nothing is there


def spoil(file: Path, change: Callable[[bytes, random.Random], bytes], draw: random.Random) -> None:
    """Put a bad file in the place of a good one."""
    if draw.random() < 0.02:
        bad_place(file, draw)
    else:
        file.write_bytes(change(file.read_bytes(), draw))
