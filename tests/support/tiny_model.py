"""A tiny Qwen2-shaped model with random weights, and what transformers says about it."""

from pathlib import Path

import numpy as np
import torch

VOCAB = 48


def make_tiny_model(folder: Path, seed: int = 0, *, eos: int | None = 2, hidden: int = 128, layers: int = 4,
                    dtype: torch.dtype = torch.float32, context: int = 1024) -> Path:
    """Save a model of VOCAB tokens (1.0M parameters by default) and return its folder. Models that differ in `seed` alone are versions of
    one another. No tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos,
        pad_token_id=0, initializer_range=0.08)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return folder


def forward_logprobs(folder: Path, prompt: list[int], response: list[int], temperature: float = 1.0) -> np.ndarray:
    """float32 [len(response)]: transformers' log-probs of the response's tokens, in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)[len(prompt) - 1:-1]
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].float().numpy()
