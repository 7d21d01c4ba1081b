"""What an SGLang server is started with, and what it may never be started with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

OURS = "Leeway sets it itself"
RUNS_CODE = "it lets a model's folder, a file or a request run code"
LISTENS = "it opens a further socket that asks for no key"
REFUSED = {
    "--model-path": OURS, "--device": OURS, "--dtype": OURS, "--host": OURS, "--port": OURS, "--api-key": OURS, "--admin-api-key": OURS,
    "--load-format": OURS, "--skip-tokenizer-init": OURS, "--weight-version": OURS, "--random-seed": OURS, "--max-total-tokens": OURS,
    "--context-length": OURS, "--attention-backend": OURS, "--sampling-backend": OURS,
    "--trust-remote-code": RUNS_CODE, "--enable-custom-logit-processor": RUNS_CODE, "--custom-weight-loader": RUNS_CODE,
    "--forward-hooks": RUNS_CODE, "--config": RUNS_CODE, "--enable-lora": RUNS_CODE, "--lora-paths": RUNS_CODE, "--tool-server": RUNS_CODE,
    "--enable-multimodal": RUNS_CODE, "--use-ray": RUNS_CODE, "--sidecar": RUNS_CODE,
    "--grpc-mode": LISTENS, "--grpc-port": LISTENS, "--smg-grpc-mode": LISTENS, "--smg-http-sidecar-port": LISTENS, "--nnodes": LISTENS,
    "--dist-init-addr": LISTENS, "--disaggregation": LISTENS, "--encoder": LISTENS, "--enable-dp-attention": LISTENS,
    "--decoupled-spec": LISTENS,
    "--preferred-sampling-params": "it changes what is sampled from", "--allow-auto-truncate": "it cuts prompts short in silence",
    "--is-embedding": "such a server generates nothing",
}
"""By name; longer names that begin so are refused too, and so are the abbreviations that argparse takes."""

CPU_FLAGS = ("--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup")
CPU_BACKENDS = {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class EngineSettings:
    """`model_path` is a folder with config.json and safetensors. `port` 0 picks a free one, `api_key` None makes one up. `log_path`
    receives everything SGLang prints. `weight_version` labels the weights it starts with. Raises ValueError, naming it, for a flag in
    `extra_args` that is not safe or not free to choose."""

    model_path: str
    log_path: Path
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    port: int = 0
    max_total_tokens: int | None = None
    context_length: int | None = None
    attention_backend: str | None = None
    sampling_backend: str | None = None
    random_seed: int = 0
    weight_version: int = 0
    api_key: str | None = field(default=None, repr=False)
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_extra_args(self.extra_args)

    def arguments(self, port: int) -> list[str]:
        """The command line of sglang.launch_server, without the key."""
        backends: dict[str, str] = CPU_BACKENDS if self.device == "cpu" else {}
        options = {
            "--model-path": self.model_path, "--device": self.device, "--dtype": self.dtype, "--host": "127.0.0.1", "--port": port,
            "--load-format": "safetensors", "--weight-version": self.weight_version, "--random-seed": self.random_seed,
            "--max-total-tokens": self.max_total_tokens, "--context-length": self.context_length,
            "--attention-backend": self.attention_backend or backends.get("--attention-backend"),
            "--sampling-backend": self.sampling_backend or backends.get("--sampling-backend"),
        }
        given = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
        flags = CPU_FLAGS if self.device == "cpu" else ()
        return [*given, "--skip-tokenizer-init", "--log-level", "warning", *flags, *self.extra_args]


def check_extra_args(words: tuple[str, ...]) -> None:
    for word in words:
        flag = word.split("=", 1)[0].replace("_", "-")
        if not flag.startswith("--"):
            continue
        for name, why in REFUSED.items():
            if flag.startswith(name) or name.startswith(flag):
                raise ValueError(f"engine argument {word!r} is refused: {name} may not be given, since {why}")
