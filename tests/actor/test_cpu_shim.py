"""The two stand-ins that let SGLang start on a CPU: they hide nothing that is really there."""

import os
import subprocess
import sys
from pathlib import Path

import actor.engine_process

SHIM = Path(actor.engine_process.__file__).parent / "cpu_shim"


def python(code: str, *path: Path) -> str:
    """Run `code` with the shim first on PYTHONPATH, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SHIM, *path)))}
    return subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_names_and_submodules_resolve_and_raise_when_called() -> None:
    assert python("""if True:
        import sgl_kernel
        from sgl_kernel.flash_attn import flash_attn_varlen_func
        from sgl_kernel import rmsnorm
        assert not hasattr(sgl_kernel, "__nothing__")
        for call in (rmsnorm, flash_attn_varlen_func, sgl_kernel.a.b.c):
            try:
                call(1)
            except NotImplementedError as error:
                print(error)
        """).splitlines() == [f"sgl_kernel.{name} was called: SGLang's compiled kernels are not installed"
                              for name in ("rmsnorm", "flash_attn.flash_attn_varlen_func", "a.b.c")]


def test_a_real_sgl_kernel_wins(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("real = True")
    assert python("import sgl_kernel; print(sgl_kernel.real, sgl_kernel.__file__)", tmp_path) == f"True {tmp_path}/sgl_kernel.py"


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.other_ran = True")
    assert python("print(other_ran, end=' '); import sgl_kernel; print(sgl_kernel.__version__)", tmp_path) == "True 0.0.0"


def test_the_engines_torchvision_imports_beside_a_cpu_torch() -> None:
    assert python("import torchvision; print('imported')", Path(actor.engine_process.ENGINE_ONLY)) == "imported"


def test_nobody_else_sees_that_torchvision() -> None:
    """Else a plain `from_pretrained` of a run's model/ fails in this environment."""
    assert python("import importlib.util; print(importlib.util.find_spec('torchvision'))") == "None"
