"""Mathematical equality with the `answer` column, by math-verify."""

from importlib.metadata import version
from typing import Any

from math_verify import parse, verify

from verifier.call import text_of
from wire.record import Failed

__version__ = version("math-verify")


def equivalent(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None | Failed]:
    """1.0 when the last expression of the completion equals the answer, else 0.0 (also when there is none to be found).

    The answer may be bare ("1/2", "x^2") or in LaTeX with or without dollars; one that cannot be read is a failure, not a 0.
    """
    return [_verdict(text_of(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def _verdict(text: str, wanted: Any) -> float | None | Failed:
    if wanted is None:
        return None
    gold = _parse(str(wanted)) or _parse(rf"\boxed{{{wanted}}}")
    if not gold:
        return Failed("unreadable_answer", str(wanted))
    return float(verify(gold, _parse(text), timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[Any]:
    """math-verify's own timeouts turn a hang into "not equal": they are off, the worker's deadline holds instead."""
    return parse(text, parsing_timeout=None, raise_on_error=True)
