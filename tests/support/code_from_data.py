"""Finds, in Python source, what turns bytes from elsewhere into running code. By syntax tree, so comments and strings do not count."""

import ast
from pathlib import Path

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib", "msgpack_numpy",
           "multiprocessing"}
"""Importing one is enough. multiprocessing pickles whatever passes through its queues and pipes."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
         "pandas.read_pickle",
         "torch.jit.load", "torch.package.PackageImporter", "code.interact", "runpy.run_path", "builtins.eval", "builtins.exec"}
METHODS = {"recv_pyobj", "send_pyobj", "load_checkpoint", "broadcast_object_list", "all_gather_object", "gather_object",
           "scatter_object_list", "send_object_list", "recv_object_list", "read_pickle", "to_pickle"}
"""Of whatever object: zmq's and torch.distributed's pickle, DeepSpeed's load_checkpoint unpickles."""
UNLESS = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}


def findings(source: str) -> list[str]:
    """`line: what` of each."""
    tree = ast.parse(source)
    names = _names(tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found += [(node.lineno, f"import {a.name}") for a in aliases if a.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module), level=0):
                found += [(node.lineno, f"from {module} import {a.name}") for a in node.names
                          if module.split(".")[0] in MODULES or f"{module}.{a.name}" in CALLS or f"{module}.{a.name}" in UNLESS]
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS and name not in names:
                found.append((node.lineno, name))
            case ast.Call():
                found += [(node.lineno, what) for what in _call(node, names)]
    return [f"{line}: {what}" for line, what in sorted(found)]


def _call(node: ast.Call, names: dict[str, str]) -> list[str]:
    name = _dotted(node.func, names)
    if name == "importlib.import_module" and node.args and isinstance(node.args[0], ast.Constant):
        return [f"import_module({node.args[0].value!r})"] if str(node.args[0].value).split(".")[0] in MODULES else []
    if name in UNLESS:
        keyword, value = UNLESS[name]
        given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
        return [] if given.get(keyword, not value) is value or (name == "numpy.load" and not _is_given(node, keyword)) else [name]
    if name in CALLS:
        return [name]
    return [node.func.attr] if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS else []


def _is_given(node: ast.Call, keyword: str) -> bool:
    """By name, or by a position or ** that cannot be told."""
    return len(node.args) > 1 or any(word.arg in (keyword, None) for word in node.keywords)


def _names(tree: ast.AST) -> dict[str, str]:
    """What imported names stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value, names)}.{attr}"
        case _:
            return "?"


def python_files(root: Path, packages: tuple[str, ...]) -> list[Path]:
    return sorted(file for package in packages for file in (root / package).rglob("*.py"))
