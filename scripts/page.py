"""What a script writes into a page: the text between two marks, `<!-- NAME -->` and `<!-- end -->`."""

import re
from pathlib import Path


def place(page: Path, mark: str, text: str) -> None:
    """Put `text` between the page's marks of this name. Raises ValueError when they are not there."""
    whole = page.read_text()
    start, end = _between(page, whole, mark)
    page.write_text(f"{whole[:start]}{text}\n{whole[end:]}")


def placed(page: Path, mark: str) -> str:
    """What is between them now. Raises ValueError when they are not there."""
    whole = page.read_text()
    start, end = _between(page, whole, mark)
    return whole[start:end].rstrip("\n")


def _between(page: Path, whole: str, mark: str) -> tuple[int, int]:
    found = re.search(f"<!-- {re.escape(mark)} -->\n(.*?)<!-- end -->", whole, flags=re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no place for it: add '<!-- {mark} -->' and '<!-- end -->'")
    return found.span(1)
