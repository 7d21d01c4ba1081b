"""From a verifier's name to its function: a built-in, or a user's `package.module:function`. Run in the worker, never in the caller."""

import difflib
import hashlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from wire.errors import ConfigError

BUILTINS = {
    "exact": "verifier.builtin.exact:exact",
    "reasoning_gym": "verifier.builtin.exact:extracted",
    "math": "verifier.builtin.maths:equivalent",
    "json_schema": "verifier.builtin.tool_calls:conforms",
    "code": "verifier.builtin.program:passes",
}

Reward = Callable[..., Any]


class SpecError(ConfigError, ValueError):
    """The verifier's name does not lead to a function; one line that says what to change."""


def target_of(spec: str) -> str:
    """`package.module:function` for `spec`, without importing anything. Raises SpecError for a name that is neither."""
    if spec in BUILTINS:
        return BUILTINS[spec]
    module, colon, function = spec.partition(":")
    if colon and module and function:
        return spec
    nearest = difflib.get_close_matches(spec, BUILTINS, n=1, cutoff=0.0)[0]
    raise SpecError(
        f"verifier {spec!r} is not a built-in ({', '.join(BUILTINS)}); did you mean {nearest!r}? "
        "A function of your own is written 'package.module:function'."
    )


def resolve(spec: str) -> tuple[Reward, str]:
    """The function for `spec`, and its name with a version: the module's `__version__`, else a digest of its source.

    Imports the module. Raises SpecError, one line, when there is no such function.
    """
    module_name, _, function_name = target_of(spec).partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecError(f"verifier {spec!r}: importing {module_name!r} failed with {cause[:500]}") from error
    function = getattr(module, function_name, None)
    if function is None:
        raise SpecError(f"verifier {spec!r}: module {module_name!r} has no {function_name!r}")
    if not callable(function):
        raise SpecError(f"verifier {spec!r}: {function_name!r} is a {type(function).__name__}, not a function")
    return function, f"{spec}@{_version(module)}"


def _version(module: ModuleType) -> str:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    source = inspect.getsourcefile(module)
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12] if source else "unknown"
