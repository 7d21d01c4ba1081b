"""No byte from a socket, a file or a model is ever executed: nothing in our packages could. The exceptions are written here."""

from pathlib import Path

import pytest

from tests.support.code_from_data import findings, python_files
from wire.process import PACKAGES

ROOT = Path(__file__).parent.parent
ALLOWED = {
    # DeepSpeed's loader unpickles. Only on our own checkpoint, after `read` found the same owner, no write access for others, and every
    # digest as written.
    "learner/checkpoint.py": ["load_checkpoint"],
    # The bench's own children, on its own machine: no byte of a peer's.
    "scripts/bench/ingest.py": ["import multiprocessing"],
}
PLANTED = [
    "import pickle", "import pickle as p", "from pickle import loads", "import dill", "from dill import load", "import marshal",
    "from marshal import loads as f", "import cloudpickle", "import shelve", "import msgpack_numpy", "import joblib",
    "import multiprocessing.connection", "import importlib\nimportlib.import_module('pickle')",
    "from importlib import import_module as f\nf('dill.x')", "__import__('pickle')",
    "eval('1')", "x = map(eval, y)", "import builtins\nbuiltins.eval('1')", "exec('x')", "f = exec", "compile('x', 'y', 'exec')",
    "import yaml\nyaml.load(x)", "import yaml as y\ny.load(x, y.SafeLoader)", "from yaml import unsafe_load", "from yaml import load",
    "import torch\ntorch.load(x)", "import torch as t\nt.load(x, weights_only=False)",
    "import torch\ntorch.load(x, weights_only=flag)",
    "from torch import load\nload(x, weights_only=False)", "import torch\ntorch.load(x, **more)", "import torch\ntorch.jit.load(x)",
    "import numpy as np\nnp.load(x, allow_pickle=True)", "import numpy as np\nnp.load(x, None, True)",
    "import pandas\npandas.read_pickle(x)", "socket.recv_pyobj()", "socket.send_pyobj(x)", "engine.load_checkpoint(x)",
    "import torch.distributed as dist\ndist.broadcast_object_list(x)", "def f():\n    import pickle",
]
HARMLESS = [
    "model.eval()", "config.eval.samples", "class C:\n    eval: int = 1", "# pickle\nx = 'import pickle; eval(1)'",
    "os.execv(a, b)",
    "import torch\ntorch.load(x, weights_only=True)", "import numpy as np\nnp.load(x)",
    "import numpy as np\nnp.load(x, allow_pickle=False)",
    "import yaml\nyaml.safe_load(x)", "json.loads(x)", "import re\nre.compile('x')", "from re import compile\ncompile('x')",
    "file.load(x)", "from safetensors.torch import load",
]


def test_nothing_in_our_packages_runs_what_it_is_sent() -> None:
    files = python_files(ROOT, (*PACKAGES, "scripts"))
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): [line.partition(": ")[2] for line in findings(file.read_text())] for file in files}
    assert {file: what for file, what in found.items() if what} == ALLOWED


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_one_is_found(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize("source", HARMLESS)
def test_what_only_looks_like_it_is_not(source: str) -> None:
    assert findings(source) == []
