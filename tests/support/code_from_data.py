"""Finds, in Python source, what turns bytes or names from elsewhere into running code.

By syntax tree, so comments and strings do not count. Any reference counts, not only a call: `f = torch.load` is found where it stands.
"""

import ast
from pathlib import Path

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib", "msgpack_numpy",
           "multiprocessing", "torch.multiprocessing", "torch.distributed.rpc", "runpy", "imp", "zipimport", "code", "codeop", "builtins",
           "torch.hub", "logging.config"}
"""Importing one, or naming one, is enough. multiprocessing pickles whatever passes through its queues and pipes."""
BUILTINS = {"eval", "exec", "compile", "__import__", "__builtins__"}
NAMES = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
         "torch.jit.load", "torch.package.PackageImporter", "torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline",
         "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process.ProcessPoolExecutor",
         "importlib.__import__", "importlib.reload", "importlib.util.spec_from_file_location", "importlib.machinery.SourceFileLoader",
         "runpy.run_module", "runpy.run_path", "pkgutil.resolve_name", "pydoc.locate", "types.FunctionType", "types.CodeType",
         "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"}
METHODS = {"recv_pyobj", "send_pyobj", "load_checkpoint", "broadcast_object_list", "all_gather_object", "gather_object",
           "scatter_object_list", "send_object_list", "recv_object_list", "read_pickle", "to_pickle", "exec_module",
           "enable_load_extension", "load_extension"}
"""Of whatever object, and imported from wherever: zmq's and torch.distributed's pickle, DeepSpeed's load_checkpoint unpickles."""
UNLESS = {"torch.load": ("weights_only", True), "torch.serialization.load": ("weights_only", True), "numpy.load": ("allow_pickle", False),
          "numpy.lib.npyio.load": ("allow_pickle", False)}
IMPORT = "importlib.import_module"
"""Of a name that stands there and is none of MODULES."""
KEYWORDS = {"trust_remote_code", "shell"}
"""Given as anything but False."""


def findings(source: str) -> list[str]:
    """`line: what` of each."""
    tree = ast.parse(source)
    names = _names(tree)
    sound = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_sound(node, names)}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found += [(node.lineno, f"import {a.name}") for a in aliases if _in_module(a.name)]
            case ast.ImportFrom(module=str(module), level=0):
                found += [(node.lineno, f"from {module} import {a.name}") for a in node.names if _is_bad_import(module, a.name)]
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS and name not in names:
                found.append((node.lineno, name))
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()) if id(node) not in sound:
                found += [(node.lineno, what) for what in _reference(node, names)]
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]) if name in METHODS | BUILTINS:
                found.append((node.lineno, f"getattr {name}"))
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS and not _is_false(value):
                found.append((value.lineno, f"{name}="))
            case ast.Dict(keys=keys, values=values):
                found += [(value.lineno, f"{key.value}:") for key, value in zip(keys, values, strict=True)
                          if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and not _is_false(value)]
    return [f"{line}: {what}" for line, what in sorted(found)]


def _reference(node: ast.Name | ast.Attribute, names: dict[str, str]) -> list[str]:
    name = _dotted(node, names)
    if name in NAMES or name in UNLESS or name == IMPORT or name in MODULES and "." in name:
        return [name]
    return [node.attr] if isinstance(node, ast.Attribute) and node.attr in METHODS else []


def _is_sound(node: ast.Call, names: dict[str, str]) -> bool:
    """A call of something in UNLESS, or of IMPORT, in the way that does no harm."""
    name = _dotted(node.func, names)
    if name == IMPORT:
        return bool(node.args) and isinstance(node.args[0], ast.Constant) and not _in_module(str(node.args[0].value))
    if name not in UNLESS:
        return False
    keyword, value = UNLESS[name]
    given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
    return given.get(keyword) is value if keyword == "weights_only" or _is_given(node, keyword) else True


def _is_given(node: ast.Call, keyword: str) -> bool:
    """By name, or by a position or ** that cannot be told."""
    return len(node.args) > 1 or any(word.arg in (keyword, None) for word in node.keywords)


def _is_bad_import(module: str, name: str) -> bool:
    full = f"{module}.{name}"
    return _in_module(full) or full in NAMES or full in UNLESS or name in METHODS or full == IMPORT \
        or name == "*" and any(known.startswith(f"{module}.") for known in NAMES | UNLESS.keys() | {IMPORT})


def _in_module(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in MODULES for end in range(1, len(parts) + 1))


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _names(tree: ast.AST) -> dict[str, str]:
    """What imported names stand for, and other names that were given to them as they are."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=name)) if name in found:
                found.setdefault(target, found[name])
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
