"""Python files stay small: at most 400 lines, tests 500. A file that wants to grow is two rooms."""

import subprocess
import sys
from pathlib import Path

LIMIT, TEST_LIMIT = 400, 500
ROOT = Path(__file__).resolve().parent.parent


def tracked_python_files() -> list[Path]:
    """Everything that git tracks or would track."""
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT, check=True,
                             capture_output=True, text=True)
    return [path for name in listing.stdout.splitlines() if (path := ROOT / name).is_file()]


def main() -> int:
    findings = []
    for path in tracked_python_files():
        name = path.relative_to(ROOT)
        limit = TEST_LIMIT if name.parts[0] == "tests" else LIMIT
        if (lines := len(path.read_text().splitlines())) > limit:
            findings.append(f"{name}: {lines} lines, at most {limit}: make it two files")
    print("\n".join(findings) or "File sizes: fine")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
