"""The DeepSpeed side: old log-probs, advantages, objective, update, publish, checkpoint, rerun."""

import os
import sys

# DeepSpeed's compiled helper lives in this environment: its build names our paths, so environments that shared one would rebuild it in turn
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
