"""The DeepSpeed side: old log-probs, advantages, objective, update, publish, checkpoint, rerun."""

import os
import sys
from pathlib import Path

from learner.torchvision_ops import install

BUILT = Path(sys.prefix) / "torch-extensions"
"""Where `make setup` compiled DeepSpeed's helper: each environment has its own, or two on one machine would compile it anew in turns."""

if BUILT.is_dir():
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(BUILT))
install()
