"""Prompt to token ids, and response ids to text. What is sent to the engine is what is stored; text is never tokenised a second time."""

from typing import Any

from actor.sglang_answer import PROMPT_RESERVE
from wire.digest import digest, digest_json
from wire.errors import ConfigError


class Tokeniser:
    """The model's tokenizer (loaded from the folder `path`), with its chat template where the task wants it.

    `chat`: True applies the template to every prompt (a text becomes one user message), False to none, None to chat messages only.
    Raises ConfigError when `path` has no tokenizer, or no template although one is needed.
    """

    def __init__(self, path: str, chat: bool | None) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {path!r}: no tokenizer loads from there: {str(error).splitlines()[0]}") from None
        self._path, self._chat = path, chat
        if chat:
            self._require_template()

    @property
    def digest(self) -> str:
        """Of all that decides which ids a text becomes: the tokenizer's own complete form, and the chat template."""
        tokenizer = self._tokenizer
        body = tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else digest_json(tokenizer.get_vocab()).encode()
        return digest(body, (tokenizer.chat_template or "").encode())

    def prompt_ids(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt; special tokens as the tokenizer, or its chat template, adds them."""
        if isinstance(prompt, str) and not self._chat:
            return list(self._tokenizer(prompt)["input_ids"])
        if self._chat is False:
            raise ConfigError("the prompts are chat messages and task.chat is false: remove task.chat, or give text prompts")
        self._require_template()
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))

    def texts(self, responses: list[list[int]]) -> list[str]:
        """Text of each response, without special tokens."""
        return list(self._tokenizer.batch_decode(responses, skip_special_tokens=True))

    def _require_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {self._path!r} has no chat template: use text prompts with task.chat = false, "
                              "or a model whose tokenizer has one")


def unfit(prompt_ids: list[int], max_new_tokens: int, vocab_size: int, longest: int) -> str | None:
    """Why this prompt must not be sent (it would fail its whole batch, or end the engine), or None. `longest`: tokens of prompt and
    response."""
    if not prompt_ids:
        return "empty_prompt"
    if len(prompt_ids) + max(max_new_tokens, PROMPT_RESERVE) > longest:
        return "prompt_too_long"
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        return "token_out_of_vocabulary"
    return None
