"""Python files stay small: at most 400 lines, tests 500. A file that wants to grow is two rooms."""

import sys
import tomllib
from pathlib import Path

LIMIT, TEST_LIMIT = 400, 500
ROOT = Path(__file__).resolve().parent.parent


def folders() -> list[str]:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    return [*sorted({package.split(".")[0] for package in packages}), "scripts", "tests"]


def main() -> int:
    findings = []
    for folder in folders():
        limit = TEST_LIMIT if folder == "tests" else LIMIT
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (lines := len(path.read_text().splitlines())) > limit:
                findings.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}: make it two files")
    print("\n".join(findings) or "File sizes: fine")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
