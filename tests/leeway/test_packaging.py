"""What is shipped: every package folder is listed, every data file is in it, versions are pinned, the reference page is current."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
TOP = [name for name in SETUPTOOLS["packages"] if "." not in name]
STAND_INS = ROOT / "actor" / "cpu_shim"


def test_every_package_folder_is_listed() -> None:
    found = {".".join(init.parent.relative_to(ROOT).parts) for top in TOP for init in (ROOT / top).rglob("__init__.py")
             if STAND_INS not in init.parents}
    assert found == set(SETUPTOOLS["packages"])


def test_every_data_file_is_shipped() -> None:
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc") or STAND_INS in path.parents and path.suffix == ".py":
                name = path.relative_to(ROOT / top).as_posix()
                assert any(fnmatch(name, pattern) for pattern in SETUPTOOLS["package-data"].get(top, [])), f"{top}/{name} is not shipped"


def test_the_demo_config_is_shipped() -> None:
    assert (ROOT / "configs" / "tiny-cpu.toml").exists()


def test_the_configuration_page_is_current() -> None:
    done = subprocess.run([sys.executable, "scripts/config_reference.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run: python scripts/config_reference.py"
    done = subprocess.run([sys.executable, "scripts/recipe_reference.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run: python scripts/recipe_reference.py"


def test_requirements_are_pinned_and_constraints_agree() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = [re.split("[#;]", line)[0].strip() for line in (ROOT / name).read_text().splitlines()]
        return {package.lower().replace("_", "-"): version for package, _, version in (line.partition("==") for line in lines if line)}

    constraints = pins("constraints-cpu.txt")
    assert all(constraints.values())
    for name in ("requirements-cpu.txt", "requirements-dev.txt"):
        for package, version in pins(name).items():
            assert constraints.get(package) == version, f"{package} in {name}"
