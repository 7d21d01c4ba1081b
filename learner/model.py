"""Load the policy: model and tokenizer as transformers has them, dtype and attention as configured, everything deterministic."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.schema import Config
from learner.logprobs import PolicyModel
from wire.errors import ConfigError
from wire.folders import model_config


def set_determinism(seed: int, device: str) -> None:
    """Seeds, deterministic kernels, and on a CPU one thread unless OMP_NUM_THREADS says more: two on contended cores are much slower."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def load_policy(path: str, dtype: str, attention: str, *, partitioned: bool = False, key: str = "model.path") -> PolicyModel:
    """The model in eval mode (no dropout: every forward of the same weights is the same function). `partitioned`: for ZeRO 3.
    `key` names the setting that gave the path. Raises ConfigError."""
    model_config(path, key)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key} = {path!r} does not load: {str(error).splitlines()[0]}") from None
    policy = PolicyModel(model.eval(), partitioned=partitioned)
    check_head(policy, path)
    return policy


def load_tokenizer(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path = {path!r} has no tokenizer that loads: {str(error).splitlines()[0]}") from None


@torch.no_grad()
def check_head(policy: PolicyModel, path: str) -> None:
    """Decoder and head alone must give the model's own logits; ConfigError for a model that changes them afterwards (soft caps, scales)."""
    ids = torch.arange(4)[None] % policy.vocabulary
    logits = policy.model(input_ids=ids, use_cache=False).logits
    ours = policy.model.get_output_embeddings()(policy.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3):
        raise ConfigError(f"model.path = {path!r}: this architecture changes its logits after the head, which is not supported")


def trainer_fingerprint(config: Config, policy: PolicyModel) -> str:
    """JSON of what the trainer's log-probs depend on besides weights and plan: where all three agree, so does every bit."""
    device = config.learner.device
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        hardware = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    else:
        hardware = {"name": _processor(), "capability": torch.backends.cpu.get_cpu_capability()}
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": config.model.dtype,
             "attention": config.model.attention, "device": device, "threads": torch.get_num_threads(), "head": policy.head}
    return json.dumps(facts | hardware, sort_keys=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
