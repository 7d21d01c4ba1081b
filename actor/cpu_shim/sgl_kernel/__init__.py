"""Stand-in for SGLang's compiled kernels on a CPU that has none.

SGLang imports many names from `sgl_kernel` and, without AMX, calls none of them: its layers use their own PyTorch code. So every
name and submodule resolves to a placeholder, and calling one raises NotImplementedError.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.0.0"


class Placeholder:
    """A name of the compiled package: attributes are placeholders too, a call raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{self.__name__} was called: SGLang's compiled kernels are not installed")

    def __getattr__(self, name: str) -> "Placeholder":
        return placeholder(self.__name__, name)


def placeholder(parent: str, name: str) -> Placeholder:
    if name.startswith("__"):
        raise AttributeError(name)
    return Placeholder(f"{parent}.{name}")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import sgl_kernel.anything` give a module of placeholders."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def exec_module(self, module: ModuleType) -> None:
        parent = module.__name__
        module.__getattr__ = lambda name: placeholder(parent, name)  # type: ignore[method-assign]


def __getattr__(name: str) -> Placeholder:
    return placeholder("sgl_kernel", name)


sys.meta_path.append(Submodules())
