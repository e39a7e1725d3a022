"""Plain mappings (from YAML or JSON) → typed dataclasses. Unknown keys and wrong types are errors that name the key.

Files are somebody else's: whatever a library makes of a broken one becomes one sentence that names it.
"""

import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

C = TypeVar("C")
LARGEST = {"num_labels": 1_000_000, "num_hidden_layers": 10_000, "num_layers": 10_000}  # of a config.json
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")  # other names are those of code on the hub
LONGEST = 400  # characters of a library's own words


class UnreadableError(OSError, ValueError):
    """A file or folder is broken, or does not hold what it should; the message names it."""


@contextmanager
def reading(what: str | Path, done: str = "read") -> Iterator[None]:
    """Whatever is raised while `what` is read becomes an UnreadableError: libraries raise every kind of exception."""
    try:
        yield
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"{what} cannot be {done}: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config says (ignore_mismatched_sizes=True draws those anew)"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = " ".join(str(error).split())
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]} …"
    clear = isinstance(error, ValueError | OSError) and said
    return said if clear else f"{type(error).__name__}: {said}".rstrip(": ")


def read_json(file: str | Path) -> dict[str, Any]:
    """A JSON file that holds an object, in which no key stands twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} stands in it twice")
        return values

    with reading(file):
        if Path(file).exists() and not Path(file).is_file():  # reading a pipe would wait for ever
            raise ValueError("it is not a file")
        values = json.loads(Path(file).read_text(encoding="utf-8"), object_pairs_hook=once)
        if not isinstance(values, dict):
            raise ValueError(f"it must hold keys and values, got {values!s:.40}")
        return values


def read_config(file: str | Path) -> dict[str, Any]:
    """A model's config.json, without what transformers would trust: code from the hub in the place of attention, and
    numbers of classes and layers which it would make for minutes."""
    values = read_json(file)
    for key in ("_attn_implementation", "attn_implementation", "_attn_implementation_internal"):
        if values.get(key) not in (None, *ATTENTION):
            raise UnreadableError(f"{key} in {file} must be one of {', '.join(ATTENTION)}, got {values[key]!r:.60}")
    for part in (values, *(value for value in values.values() if isinstance(value, dict))):  # towers have their own
        for key, most in LARGEST.items():
            if isinstance(count := part.get(key), int | float) and count > most:
                raise UnreadableError(f"{key} in {file} must be at most {most:,}, got {count!s:.20}")
    return values


def parse(cls: type[C], values: Any, where: str = "") -> C:
    """A dataclass from a mapping: every key known, every value of the annotated type."""
    if dataclasses.is_dataclass(values) and isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the recipe'} must be a group of keys, got {values!r}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in names:
            raise ValueError(f"unknown key {prefix}{key}; valid keys: {', '.join(names)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in values:
            raise ValueError(f"{prefix}{f.name} is missing")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        value = "no" if value is False and "no" in arguments else value  # YAML reads the word as false
        if value not in arguments:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, arguments))}; got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, where)  # type: ignore[arg-type]
    if origin in (list, tuple, collections.abc.Sequence):
        return _convert_sequence(tuple if origin is tuple else list, arguments, value, where)
    if (origin or hint) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a group of keys, got {value!r}")
        return dict(value)
    return _convert_scalar(hint, value, where)


def _convert_union(options: Sequence[Any], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is not type(None):
            try:
                return _convert(option, value, where)
            except ValueError as error:
                errors.append(str(error))
    raise ValueError(" or ".join(errors))


def _convert_sequence(origin: type, arguments: tuple, value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, got {value!r}")
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        kinds = [arguments[0] if arguments else Any] * len(value)
    else:
        kinds = list(arguments)
        if len(kinds) != len(value):
            raise ValueError(f"{where} must have {len(kinds)} entries, got {value!r}")
    return origin(
        _convert(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _convert_scalar(hint: type, value: Any, where: str) -> Any:
    """YAML reads 1e-3 (without a point) as text: text that is a number counts as one where a number is expected."""
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    elif hint is int and not isinstance(value, bool):
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    elif hint in (bool, str) and isinstance(value, hint):
        return value
    raise ValueError(f"{where} must be {wanted.get(hint, hint)}, got {value!r}")


def plain(value: Any) -> Any:
    """Tuples to lists, so that YAML and JSON give back what was written."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
