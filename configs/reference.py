"""The config's keys with their types, defaults and docstrings, read from the schema: for `leeway recipes` and docs/configuration.md."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.schema import Config


class Key(NamedTuple):
    name: str
    kind: str
    default: str
    text: str


def tables() -> Iterator[tuple[str, type[BaseModel], bool]]:
    """(name, model, required) of each table of the tree, in the order of the schema."""
    for name, field in Config.model_fields.items():
        choices = (field.annotation, *get_args(field.annotation))
        model = next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel))
        yield name, model, field.is_required()


def keys(model: type[BaseModel]) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else json.dumps(field.default)
        yield Key(name, kind(field), default, " ".join((field.description or "").split()))


def kind(field: FieldInfo) -> str:
    """In words: `int, >= 1`; `"a" | "b"`; `text or null`."""
    return ", ".join([_words(field.annotation), *_limits(tuple(field.metadata))])


def _words(annotation: Any) -> str:
    names = {int: "int", float: "float", str: "text", bool: "bool", type(None): "null", Any: "any"}
    if annotation in names:
        return names[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(json.dumps(part) for part in parts)
    if origin is Annotated:
        return ", ".join([_words(parts[0]), *_limits(parts[1:])])
    if origin in (list, tuple):
        return "[" + ", ".join(_words(part) for part in parts) + "]"
    if origin is dict:
        return "table"
    return " or ".join(_words(part) for part in parts)


def _limits(marks: tuple[Any, ...]) -> list[str]:
    return [f"{sign} {value}" for mark in marks for inner in getattr(mark, "metadata", [mark])
            for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt"))
            if (value := getattr(inner, attribute, None)) is not None]
