"""The end product: `<run>/model/`, a folder that transformers' from_pretrained loads, tokenizer included."""

import shutil
from pathlib import Path

from learner.publish import Publisher


def export(publisher: Publisher, run_dir: Path) -> None:
    """Write the live weights there. Every rank calls it; the folder appears whole or not at all."""
    state = publisher.engine.full_state()
    if not publisher.engine.ranks.is_first:
        return
    target, staged = run_dir / "model", run_dir / ".model.tmp"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    publisher.write_model(staged, state)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)
