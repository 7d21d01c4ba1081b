"""Pages that are generated: written, or with --check compared."""

import sys
from pathlib import Path


def write(path: Path, text: str) -> int:
    """Exit code: 0; with --check among the arguments nothing is written, and 1 says that the page is not current."""
    if "--check" in sys.argv:
        return 0 if path.exists() and path.read_text() == text else 1
    path.write_text(text)
    return 0
