"""The demo's beginning: a tiny model, supervised to about .45 on two-digit addition, and its data files.

`python -m learner.coldstart CONFIG...` writes `<out>/{model/, train.jsonl, heldout.jsonl, manifest.json}`; what lies there already, made
with the same settings, is used again. Nothing else in Leeway knows about it: afterwards the run is like any user's own.
"""

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from configs.load import load
from configs.schema import ColdStart
from wire.digest import digest_json
from wire.errors import ConfigError, RunError
from wire.process import run_main

FORMAT = 1
PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+="
VALIDATION = 400
EVALUATE_EVERY = 5
WARMUP = 30
PROMPT_LEN, ANSWER_LEN = len("12+34="), len("198") + 1
TOLERATED = 0.1
"""How far below `target` the last step may leave the model: kernels of other machines lead to slightly other weights."""


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str


def make(settings: ColdStart, *, say: bool = True) -> Path:
    """Make (or find) the cold start and return its folder. ConfigError for impossible settings, RunError when the model hardly learns."""
    out = Path(settings.out)
    wanted = digest_json({"format": FORMAT, **settings.model_dump(mode="json", exclude={"out"})})
    manifest = out / "manifest.json"
    if manifest.exists() and json.loads(manifest.read_text()).get("settings") == wanted:
        return out
    torch.set_num_threads(1)  # the same sums in the same order on every machine, and faster on a shared one
    staged = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    heldout, supervised, rl_prompts = split(settings)
    write_problems(staged / "heldout.jsonl", heldout)
    write_problems(staged / "train.jsonl", rl_prompts)
    tokenizer = make_tokenizer()
    model = train(make_model(settings, tokenizer), tokenizer, supervised, settings, say=say)
    model.save_pretrained(staged / "model")
    tokenizer.save_pretrained(staged / "model")
    accuracy = expected_accuracy(model, *encode(tokenizer, heldout))
    (staged / "manifest.json").write_text(json.dumps({"settings": wanted, "heldout_sampled": accuracy[0], "heldout_greedy": accuracy[1]}))
    shutil.rmtree(out, ignore_errors=True)
    staged.rename(out)
    return out


def split(settings: ColdStart) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """All 8,100 sums of two two-digit numbers, shuffled, as (held-out, supervised, RL prompts): disjoint."""
    problems = [Problem(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    random.Random(settings.seed).shuffle(problems)
    cut = settings.heldout + settings.supervised
    if cut >= len(problems):
        raise ConfigError(f"cold_start.heldout + cold_start.supervised = {cut} leaves none of the {len(problems)} problems for RL")
    return problems[: settings.heldout], problems[settings.heldout : cut], problems[cut:]


def write_problems(path: Path, problems: list[Problem]) -> None:
    path.write_text("".join(json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in problems))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; decoding joins them without spaces."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)


def make_model(settings: ColdStart, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=settings.hidden_size, intermediate_size=4 * settings.hidden_size,
        num_hidden_layers=settings.layers, num_attention_heads=settings.heads, num_key_value_heads=settings.kv_heads,
        max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, dtype="float32"))


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """Token ids [P, 10], right-padded, and the mask [P, 10] of answer tokens (end token included)."""
    ids = torch.full((len(problems), PROMPT_LEN + ANSWER_LEN), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, problem in enumerate(problems):
        tokens = [*tokenizer.encode(problem.prompt + problem.answer), tokenizer.eos_token_id]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, PROMPT_LEN : len(tokens)] = True
    return ids, mask


def answer_logits(model: Qwen2ForCausalLM, ids: Tensor) -> Tensor:
    """Logits of the answer's positions only, [P, 4, V]."""
    return model(input_ids=ids[:, :-1], logits_to_keep=ANSWER_LEN, use_cache=False).logits


@torch.no_grad()
def expected_accuracy(model: Qwen2ForCausalLM, ids: Tensor, mask: Tensor) -> tuple[float, float]:
    """(sampled, greedy): the probability that a sample at temperature 1 is right, exactly; and the share of right greedy answers."""
    logits, targets, kept = answer_logits(model, ids), ids[:, PROMPT_LEN:], mask[:, PROMPT_LEN:]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    sampled = log_probs.where(kept, 0.0).sum(-1).exp().mean()
    greedy = ((logits.argmax(-1) == targets) | ~kept).all(-1).float().mean()
    return float(sampled), float(greedy)


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], settings: ColdStart, *,
          say: bool) -> Qwen2ForCausalLM:
    """Supervised steps until a validation split of the supervised problems is answered right with probability `target`."""
    ids, mask = encode(tokenizer, problems[VALIDATION:])
    validation = encode(tokenizer, problems[:VALIDATION])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(settings.seed)
    started, sampled, greedy = time.monotonic(), 0.0, 0.0
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(step / WARMUP, 1 - 0.9 * step / settings.steps)
        rows = torch.randint(len(ids), (settings.batch,), generator=generator)
        targets = ids[rows, PROMPT_LEN:].masked_fill(~mask[rows, PROMPT_LEN:], -100)
        loss = torch.nn.functional.cross_entropy(answer_logits(model, ids[rows]).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVALUATE_EVERY == 0:
            sampled, greedy = expected_accuracy(model, *validation)
            if say:
                progress(step, settings.steps, loss.item(), sampled, greedy, time.monotonic() - started)
            if sampled >= settings.target:
                break
    if say:
        print(f"\ncold start: {step} steps, {time.monotonic() - started:.0f} s: {sampled:.2f} of samples right, {greedy:.2f} greedy",
              file=sys.stderr, flush=True)
    if sampled < settings.target - TOLERATED:
        raise RunError(f"cold start: {sampled:.2f} right after {settings.steps} steps, wanted {settings.target}: raise cold_start.steps")
    return model


def progress(step: int, steps: int, loss: float, sampled: float, greedy: float, seconds: float) -> None:
    line = f"cold start: step {step}/{steps}  loss {loss:.3f}  sampled {sampled:.2f}  greedy {greedy:.2f}  {seconds:.0f} s"
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
    elif step % (10 * EVALUATE_EVERY) == 0:
        print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.coldstart", description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    options = parser.parse_args()
    try:
        config = load(options.config, options.set)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.cold_start is None:
        raise ConfigError("this config has no [cold_start] table: there is nothing to make")
    disable_progress_bar()
    print(make(config.cold_start))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
