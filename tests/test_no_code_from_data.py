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
    # The user's reward function, by the name in the user's own config; no name comes from a peer.
    "verifier/resolve.py": ["importlib.import_module"],
    # SGLang's own launcher, by its name as it stands there, in a process that the actor starts for it.
    "actor/engine_launch.py": ["import runpy", "runpy.run_module"],
    # The `sitecustomize` of this Python, which it would have run without ours.
    "actor/cpu_shim/sitecustomize.py": ["exec_module"],
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
    "import torch\ntorch.serialization.load(x)", "import torch\nf = torch.load\nf(x)", "import torch\nf = [torch.load]",
    "import torch\nt = torch\nt.load(x)",
    "from torch.serialization import load", "from torch import *", "import numpy\nf = numpy.load", "import torch\nf = torch.jit.load",
    "A.from_pretrained(x, trust_remote_code=True)", "A.from_pretrained(x, trust_remote_code=flag)", "f(**{'trust_remote_code': True})",
    "import runpy\nrunpy.run_module('x')", "from runpy import run_path", "import code", "import imp",
    "from torch.distributed import broadcast_object_list", "from torch.distributed import gather_object", "f = dist.gather_object",
    "from torch.distributed import all_gather_object", "from torch.distributed import scatter_object_list as s",
    "getattr(dist, 'gather_object')",
    "import torch.distributed.rpc", "from torch.distributed import rpc", "import torch\ntorch.distributed.rpc.init_rpc(x)",
    "import torch.multiprocessing as mp", "from torch import multiprocessing", "import torch\ntorch.hub.load(x)",
    "import importlib\nimportlib.import_module(name)", "from importlib import import_module",
    "import importlib\nf = importlib.import_module",
    "from importlib.util import spec_from_file_location", "spec.loader.exec_module(module)", "import pydoc\npydoc.locate(x)",
    "from multiprocessing import Queue", "from multiprocessing.connection import Client",
    "from concurrent.futures import ProcessPoolExecutor",
    "f = socket.recv_pyobj", "import subprocess\nsubprocess.run(x, shell=True)", "import subprocess\nsubprocess.Popen(x, shell=flag)",
    "import os\nos.system(x)", "import os\nos.popen(x)", "from os import system", "import subprocess\nsubprocess.getoutput(x)",
    "import asyncio\nasyncio.create_subprocess_shell(x)", "import types\ntypes.FunctionType(x, y)", "from builtins import eval as e",
    "__builtins__['eval']", "import logging.config", "db.enable_load_extension(True)", "import pandas\nf = pandas.DataFrame.to_pickle",
]
HARMLESS = [
    "model.eval()", "config.eval.samples", "class C:\n    eval: int = 1", "# pickle\nx = 'import pickle; eval(1)'",
    "os.execv(a, b)",
    "import torch\ntorch.load(x, weights_only=True)", "import numpy as np\nnp.load(x)",
    "import numpy as np\nnp.load(x, allow_pickle=False)",
    "import yaml\nyaml.safe_load(x)", "json.loads(x)", "import re\nre.compile('x')", "from re import compile\ncompile('x')",
    "file.load(x)", "from safetensors.torch import load", "import importlib\nimportlib.import_module('json')",
    "import torch\ntorch.save(x, y)",
    "A.from_pretrained(x, trust_remote_code=False)", "import subprocess\nsubprocess.run([x], shell=False)", "import os\nos.execv(x, y)",
    "import importlib.util\nimportlib.util.find_spec('x')", "x = {'trust_remote_code': False}", "import zmq\nsocket.recv(zmq.NOBLOCK)",
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
