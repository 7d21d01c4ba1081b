"""Equality with the `answer` column, of the whole completion or of the answer extracted from it."""

import re
from typing import Any

from verifier.call import text_of

__version__ = "1"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """1.0 when completion and answer are equal after stripping white space, else 0.0. A row without an answer has no verdict."""
    return [_equal(text_of(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def extracted(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """As `exact`, of the text in the last `<answer>` tag; without a tag, of the whole completion. For reasoning-gym's tasks.

    reasoning-gym's own scorers are not used: the default one pays for substrings ("17x" for 7), which a policy learns, and others call
    `eval` on the answer.
    """
    return [_equal(extract(text_of(completion)), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def extract(text: str) -> str:
    found = ANSWER.findall(text)
    return found[-1] if found else text


def _equal(text: str, wanted: Any) -> float | None:
    return None if wanted is None else float(text.strip() == str(wanted).strip())
