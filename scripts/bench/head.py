"""Selected log-probs and their gradient at SmolLM2's vocabulary: the chunked head beside the plain one, each in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.bench.machine import markdown

ROWS, TOKENS, HIDDEN, VOCABULARY = 4, 1024, 576, 49_152


def table() -> str:
    rows = []
    for dtype in ("float32", "bfloat16"):
        for head in ("plain", "chunked"):
            command = [sys.executable, "-m", "scripts.bench.head", head, dtype]
            run = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, text=True)
            found = json.loads(run.stdout)
            rows.append([dtype, head, f"{found['mib']:.0f}", f"{found['seconds']:.1f}"])
    return (
        f"Log-probs of {ROWS} x {TOKENS:,} tokens from hidden states of {HIDDEN} over a vocabulary of {VOCABULARY:,}, forward and "
        "backward. Memory: the peak of the process above what it held before, the two gradients included:\n\n"
        + markdown(["dtype", "head", "MiB at the peak", "CPU seconds"], rows)
    )


def measure(head_name: str, dtype_name: str) -> dict[str, float]:
    """One forward and backward in this process."""
    import torch

    from learner.chunked_head import selected_log_probs
    from learner.logprobs import selected

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
    hidden = torch.randn(ROWS * TOKENS, HIDDEN).to(dtype).requires_grad_()
    target, temperature = torch.randint(VOCABULARY, (len(hidden),)), torch.ones(len(hidden))
    with torch.no_grad():
        selected(head, hidden[:8], target[:8], temperature[:8])  # libraries take their own memory at the first product
    before, began = peak_mib(), time.process_time()
    if head_name == "chunked":
        value = selected_log_probs(hidden, head.weight, target, temperature)
    else:
        value = selected(head, hidden, target, temperature)
    value.sum().backward()
    return {"mib": peak_mib() - before, "seconds": time.process_time() - began}


def peak_mib() -> float:
    """VmHWM, not getrusage's ru_maxrss: that one starts, in a child, from what its parent held."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
