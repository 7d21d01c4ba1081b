"""Tool calls: JSON in the completion against the JSON Schema in the `schema` column."""

import json
import re
from importlib.metadata import version
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry

from verifier.call import text_of

__version__ = version("jsonschema")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)


def conforms(completions: list[Any], schema: list[Any], **_: Any) -> list[float | None]:
    """1.0 when every tool call is JSON that conforms to the schema (a dict, or JSON text), else 0.0.

    Tool calls are the texts in `<tool_call>` tags; without a tag, the whole completion, a ``` fence around it taken off. A schema that is
    itself invalid, or that refers to another document, is an exception: nothing is fetched.
    """
    return [_verdict(text_of(completion), wanted) for completion, wanted in zip(completions, schema, strict=True)]


def _verdict(text: str, schema: Any) -> float | None:
    if schema is None:
        return None
    schema = json.loads(schema) if isinstance(schema, str) else schema
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    validator = kind(schema, registry=Registry())
    try:
        calls = [json.loads(call, parse_constant=_refuse) for call in CALL.findall(text) or [_unfenced(text)]]
    except ValueError:
        return 0.0  # not JSON: a wrong answer, not a failure to judge
    return float(all(validator.is_valid(call) for call in calls))


def _unfenced(text: str) -> str:
    fence = FENCE.match(text.strip())
    return fence.group(1) if fence else text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
