from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actor.tokenise import Tokeniser, unfit
from wire.errors import ConfigError

CHARACTERS = ["<pad>", "<end>", "<unk>", *"0123456789+=?:ua "]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def save(folder: Path, template: str | None = None) -> str:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(CHARACTERS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def test_text_is_tokenised_as_it_is(tmp_path: Path) -> None:
    tokeniser = Tokeniser(save(tmp_path), None)
    assert tokeniser.prompt_ids("12+34=") == ids("12+34=")
    assert tokeniser.texts([ids("46"), [*ids("7"), CHARACTERS.index("<end>")], []]) == ["46", "7", ""]


def test_chat_messages_go_through_the_template_and_ask_for_an_answer(tmp_path: Path) -> None:
    tokeniser = Tokeniser(save(tmp_path, TEMPLATE), None)
    assert tokeniser.prompt_ids([{"role": "user", "content": "1+1?"}]) == ids("u:1+1? a:")
    assert tokeniser.prompt_ids("1+1?") == ids("1+1?")  # a text is a text, unless the task says chat


def test_with_chat_a_text_becomes_a_users_message(tmp_path: Path) -> None:
    assert Tokeniser(save(tmp_path, TEMPLATE), True).prompt_ids("1+1?") == ids("u:1+1? a:")


def test_what_cannot_be_done_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer loads"):
        Tokeniser(str(tmp_path / "nowhere"), None)
    with pytest.raises(ConfigError, match="no chat template"):
        Tokeniser(save(tmp_path / "plain"), True)
    messages = [{"role": "user", "content": "1"}]
    with pytest.raises(ConfigError, match="no chat template"):
        Tokeniser(str(tmp_path / "plain"), None).prompt_ids(messages)
    with pytest.raises(ConfigError, match=r"remove task\.chat"):
        Tokeniser(save(tmp_path / "chat", TEMPLATE), False).prompt_ids(messages)


def test_the_digest_is_of_vocabulary_and_template(tmp_path: Path) -> None:
    plain = Tokeniser(save(tmp_path / "a"), None).digest
    assert len(plain) == 64
    assert Tokeniser(save(tmp_path / "b"), False).digest == plain
    assert Tokeniser(save(tmp_path / "c", TEMPLATE), None).digest != plain


@pytest.mark.parametrize(("prompt", "new", "reason"), [
    ([1] * 10, 22, None), ([1] * 10, 23, "prompt_too_long"), ([1] * 27, 1, None), ([1] * 28, 1, "prompt_too_long"),  # the engine keeps 5
    ([], 4, "empty_prompt"), ([0, 16], 4, "token_out_of_vocabulary"), ([0, -1], 4, "token_out_of_vocabulary"), ([0, 15], 4, None)])
def test_what_would_harm_the_engine_is_never_sent(prompt: list[int], new: int, reason: str | None) -> None:
    assert unfit(prompt, new, vocab_size=16, longest=32) == reason
