"""A model's folder, as every process looks at it before it loads anything large."""

import json
from pathlib import Path
from typing import Any

from wire.errors import ConfigError


def model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """What the folder's config.json holds. `key` names the setting that gave the path. Raises ConfigError."""
    if not Path(path).is_dir():
        made = " (the demo's is made by `leeway run`, or by `python -m learner.coldstart CONFIG`)" if key == "model.path" else ""
        raise ConfigError(f"{key} = {path!r}: no such folder{made}")
    try:
        found = json.loads((Path(path) / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"{key} = {path!r}: no config.json in this folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {path!r}: its config.json cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{key} = {path!r}: its config.json is not an object")
    return found
