"""From TOML files and --set to a checked Config. Every complaint is one line that names the key."""

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from configs.readers import check_readers
from configs.recipes import check_label, complete, expand, named
from configs.schema import Config

NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,63}")


def load(files: list[Path], sets: list[str]) -> Config:
    """Join the files left to right, then apply `key.path=value` settings (values as TOML, else null, else text). Raises ValueError."""
    tree: dict[str, Any] = {}
    for file in files:
        try:
            _lay_over(tree, tomllib.loads(Path(file).read_text()))
        except FileNotFoundError:
            raise ValueError(f"{file}: no such config file") from None
        except OSError as error:
            raise ValueError(f"{file}: cannot be read as a config file ({error.strerror})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not valid TOML: {error}") from None
    settings: dict[str, Any] = {}
    for item in sets:
        _merge(settings, _setting(item))
    _lay_over(tree, settings)
    check_label(tree)
    config = validate(tree)
    check_readers(config)
    return config


def validate(tree: dict[str, Any]) -> Config:
    """A checked Config from plain tables; a named recipe's settings are filled in. Raises ValueError."""
    try:
        return Config.model_validate(complete(tree))
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def load_resolved(path: Path) -> Config:
    """The config that a run was started with (`<run>/config.json`)."""
    return validate(json.loads(path.read_text()))


def check_name(name: str) -> str:
    """A run's name becomes a folder: lower-case letters, digits, `.`, `_`, `-`, no leading dot, at most 64."""
    if not NAME.fullmatch(name):
        raise ValueError(f"run name {name!r}: use 1 to 64 of a-z 0-9 . _ - and no leading dot")
    return name


def _lay_over(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """A layer that names a recipe begins [recipe] anew; what the recipe wants of other tables gives way to what is there already."""
    if named(layer) is not None:
        tree["recipe"] = {}
        _merge(tree, {"recipe": expand(layer)["recipe"]})
    _merge(tree, layer)


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _setting(item: str) -> dict[str, Any]:
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[A-Za-z0-9_]+)+", key):
        raise ValueError(f"--set {item!r}: write it as table.key=value, for example --set replay.max_staleness=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text == "null" else text
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden" and where in first["loc"]:
        near = difflib.get_close_matches(where, Config.model_fields, n=1)
        return f"{where}: unknown table; " + (f"the nearest one is [{near[0]}]" if near else f"there are {', '.join(Config.model_fields)}")
    if first["type"] == "extra_forbidden":
        closest = _near(where)
        return f"{where}: unknown key; " + ("docs/configuration.md lists all" if closest is None else f"the nearest one is {closest}")
    if first["type"] == "missing":
        return f"{where}: this key is required"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message} (got {first['input']!r})" if where else message


def _near(where: str) -> str | None:
    """The key of that name in another table, or one of the same table that looks like it."""
    known, (table, _, name) = _known_keys(Config), where.rpartition(".")
    elsewhere = [key for key in known if key.endswith(f".{name}")]
    names = [key.removeprefix(f"{table}.") for key in known if key.startswith(f"{table}.")]
    return next(iter(elsewhere + [f"{table}.{near}" for near in difflib.get_close_matches(name, names, n=1)]), None)


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        tables = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        keys += _known_keys(tables[0], f"{prefix}{name}.") if tables else [f"{prefix}{name}"]
    return keys
