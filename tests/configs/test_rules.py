"""Bad input gets one line that names the key; the rules that span tables each refuse what they should and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import check_name, load, validate

BASE: dict[str, Any] = {"model": {"path": "m"}, "task": {"train": "t.jsonl"}}


def tree(**tables: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, **{name: {**BASE.get(name, {}), **table} for name, table in tables.items()}}


REFUSED = [
    (tree(sampling={"top_p": 0.9}), "sampling.top_p"),
    (tree(sampling={"top_k": 50}), "sampling.top_k"),
    (tree(sampling={"min_p": 0.1}), "sampling.min_p"),
    (tree(sampling={"temperature": 0.0}), "temperature must be above 0"),
    (tree(sampling={"frequency_penalty": 0.1}), "sampling.frequency_penalty"),
    (tree(sampling={"repetition_penalty": 1.1}), "sampling.repetition_penalty"),
    (tree(sampling={"min_new_tokens": 1}), "sampling.min_new_tokens"),
    (tree(sampling={"ignore_eos": True}), "sampling.ignore_eos"),
    (tree(sampling={"logit_bias": {"1": 2.0}}), "sampling.logit_bias"),
    (tree(recipe={"estimator": "rloo"}, sampling={"n": 1}), "at least two scored samples"),
    (tree(recipe={"estimator": "rloo"}, replay={"min_scored": 1}), "at least two scored samples"),
    (tree(replay={"min_scored": 9}), "more than sampling.n"),
    (tree(learner={"groups_per_update": 32, "steps_per_update": 3}), "cannot be split"),
    (tree(learner={"groups_per_update": 32, "ranks": 3}), "cannot be shared by 3 ranks"),
    (tree(learner={"groups_per_update": 4097}, sampling={"n": 8}, replay={"max_rollouts": 10**6}), "in one message, which holds 32768"),
    (tree(replay={"max_rollouts": 767, "max_staleness": 2}), "would deadlock"),
    (tree(recipe={"engine_low": 5.0, "engine_high": 5.0}), "must be below"),
    (tree(recipe={"group_mass_cap": 1.2, "objective": "ppo"}), "correct twice"),
    (tree(recipe={"group_mass_cap": 0.9, "objective": "score"}), "group_mass_cap"),
    (tree(recipe={"base": "prox"}), "identically 1"),
    (tree(recipe={"objective": "score", "engine": "icepop"}), "leaves staleness uncorrected"),
    (tree(recipe={"objective": "score", "engine": "tis"}, replay={"max_staleness": 0}), "no policy ratio"),
    (tree(recipe={"objective": "minirl", "engine": "tis"}), "would correct the engine twice"),
    (tree(recipe={"staleness": "sis", "engine": "tis"}, sampling={"top_logprobs": 4}), "TIS weight would correct the engine twice"),
    (tree(recipe={"staleness": "sis", "objective": "score"}, sampling={"top_logprobs": 4}), "which score is not"),
    (tree(recipe={"staleness": "sis"}), "set sampling.top_logprobs"),
    (tree(recipe={"staleness": "decoupled"}), "cur/old holds that ratio already"),
    (tree(recipe={"staleness": "decoupled", "objective": "score"}), "not for score"),
    (tree(recipe={"staleness": "m2_range", "objective": "gspo"}), "sets the clip of ppo"),
    (tree(recipe={"objective": "unit"}, learner={"steps_per_update": 2}), "one optimizer step per update"),
    (tree(recipe={"objective": "luspo"}), "multiplies by the response's length itself"),
    (tree(recipe={"objective": "ripo", "base": "prox"}, learner={"steps_per_update": 2}), "frozen old probability"),
    (tree(recipe={"objective": "fdiv"}), "set recipe.delta"),
    (tree(recipe={"objective": "gspo", "dual_clip": 3.0}), "belongs to ppo and gppo"),
    (tree(recipe={"prox": "ewma"}), "set recipe.base = 'prox'"),
    (tree(recipe={"prox": "ewma", "objective": "score"}), "leave recipe.prox out"),
    (tree(recipe={"filter": "sequence", "filter_low": 0.5}), "needs recipe.filter_low and recipe.filter_high"),
    (tree(recipe={"filter": "carm", "filter_threshold": 0.9}), "1 or more"),
    (tree(recipe={"filter": "geometric", "filter_low": 1.1, "filter_high": 0.9}), "is above"),
    (tree(recipe={"kl": 0.1}), "needs a reference policy"),
    (tree(recipe={"estimator": "zcpo"}), "recipe.estimator = 'zcpo' needs a reference policy"),
    (tree(recipe={"estimator": "zcpo", "kl": 0.1}, learner={"reference": "initial"}), "would count it twice"),
    (tree(recipe={"estimator": "zcpo"}, learner={"reference": "initial", "steps_per_update": 2}), "one optimizer step only"),
    (tree(recipe={"kl": 0.1, "kl_estimator": "k1"}, learner={"reference": "initial"}), "gradient of mean zero"),
    (tree(recipe={"kl": 0.1, "kl_in": "reward", "kl_weight": "total"}, learner={"reference": "initial"}), "belongs to the KL in the loss"),
    (tree(recipe={"dynamic_sampling": True}, replay={"min_scored": 1}), "a group of one always is"),
    (tree(recipe={"estimator": "grpo"}, sampling={"n": 1}), "'grpo' compares the samples of a group, so with sampling.n = 1 every"),
    (tree(recipe={"estimator": "zcpo"}, sampling={"n": 1}, learner={"reference": "initial"}), "'zcpo' compares the samples"),
    (tree(recipe={"estimator": "dr_grpo"}, sampling={"n": 1}), "'dr_grpo' compares the samples"),
    (tree(recipe={"estimator": "reinforce_pp_ema"}, sampling={"n": 1}), "'reinforce_pp_ema' compares the samples"),
    (tree(recipe={"filter": "geometric", "filter_low": 2.0}), "filter_low = 2.0 is above recipe.filter_high = 1.001"),
    (tree(recipe={"filter": "geometric", "filter_high": 0.9}), "filter_low = 0.999 is above recipe.filter_high = 0.9"),
    (tree(recipe={"objective": "minirl", "estimator": "dr_grpo"}), "no length normalisation, which aggregation = 'token_mean' is"),
    (tree(recipe={"objective": "minirl", "estimator": "dr_grpo", "aggregation": "sequence_mean"}), "'sequence_mean' is"),
    (tree(recipe={"objective": "minirl", "aggregation": "length_weighted"}), "unscaled advantages, which estimator = 'grpo'"),
    (tree(recipe={"prox": "ewma", "base": "prox", "ewma_window": 0}), "ewma_window = 0 makes the average the live weights"),
    (tree(recipe={"engine": "icepop", "engine_low": 1.5}), "engine_low = 1.5 to recipe.engine_high = 5.0 leaves out 1"),
    (tree(recipe={"engine": "icepop", "engine_high": 0.9}), "engine_low = 0.5 to recipe.engine_high = 0.9 leaves out 1"),
    (tree(recipe={"filter": "geometric", "filter_low": 1.0005}), "filter_low = 1.0005 to recipe.filter_high = 1.001 leaves out 1"),
    (tree(recipe={"filter": "sequence", "filter_low": 0.1, "filter_high": 0.5}), "leaves out 1"),
    (tree(recipe={"filter": "veto", "filter_threshold": 1.0}), "from 1 on it would drop nearly all"),
    (tree(recipe={"base": "prox"}), "more, or recipe.prox = 'ewma', or recipe.base = 'old'"),
    (tree(recipe={"base": "prox", "staleness": "decoupled"}), "more, or recipe.prox = 'ewma'$"),  # base = 'old' would be refused in turn
    (tree(recipe={"clip_low": True}), "recipe.clip_low: true and false are no values of this key"),
    (tree(recipe={"dual_clip": True}), "recipe.dual_clip: true and false"),
]


@pytest.mark.parametrize(("values", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_refused_in_one_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        validate(values)
    assert "\n" not in str(error.value)


ALLOWED = [
    tree(),
    tree(replay={"max_rollouts": 768, "max_staleness": 2}),
    tree(recipe={"estimator": "rloo"}, replay={"min_scored": 2}),
    tree(recipe={"base": "prox"}, learner={"steps_per_update": 2}),
    tree(recipe={"estimator": "remax"}, sampling={"n": 1}),
    tree(recipe={"estimator": "grpo"}, replay={"min_scored": 1}),
    tree(recipe={"filter": "geometric"}),
    tree(recipe={"filter": "geometric", "filter_low": 1.0, "filter_high": 1.0}),
    tree(recipe={"filter": "k3", "filter_low": 2.0}),
    tree(recipe={"objective": "minirl", "estimator": "dr_grpo", "aggregation": "constant"}),
    tree(recipe={"objective": "minirl", "estimator": "rloo", "aggregation": "length_weighted"}),
    tree(recipe={"prox": "ewma", "base": "prox", "ewma_window": 1}),
    tree(recipe={"prox": "ewma", "base": "prox"}, replay={"max_staleness": 0}),
    tree(recipe={"objective": "score", "engine": "icepop"}, replay={"max_staleness": 0}),
    tree(recipe={"objective": "score", "group_mass_cap": 1.2, "engine": "icepop"}),
    tree(recipe={"kl": 0.1, "kl_estimator": "full", "kl_in": "reward"}, learner={"reference": "initial", "steps_per_update": 2}),
    tree(recipe={"objective": "unit", "staleness": "decoupled", "engine": "tis"}),
    tree(recipe={"staleness": "sis", "engine": "icepop", "objective": "gspo"}, sampling={"top_logprobs": 4}),
    tree(recipe={"engine": "icepop", "engine_low": 1.0, "engine_high": 1.5}),
    tree(recipe={"filter": "sequence", "filter_low": 0.5, "filter_high": 1.0}),
    tree(recipe={"filter": "veto", "filter_threshold": 0.99}),
    tree(recipe={"engine_low": 2.0}),  # nothing reads it
    tree(recipe={"dynamic_sampling": True}, task={"chat": True}),
]


@pytest.mark.parametrize("values", ALLOWED)
def test_allowed(values: dict[str, Any]) -> None:
    validate(values)


def test_files_join_left_to_right_and_settings_win(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\npath = "m"\n[task]\ntrain = "t"\n[replay]\nmax_staleness = 1\nmax_attempts = 2\n')
    (tmp_path / "b.toml").write_text("[replay]\nmax_staleness = 4\n")
    config = load([tmp_path / "a.toml", tmp_path / "b.toml"], ["learner.lr=1e-5", "task.verifier=my_rewards:reward"])
    assert (config.replay.max_staleness, config.replay.max_attempts) == (4, 2)
    assert (config.learner.lr, config.task.verifier) == (1e-5, "my_rewards:reward")


@pytest.mark.parametrize(("setting", "says"), [
    ("replay.max_stalenes=4", "replay.max_stalenes: unknown key; the nearest one is replay.max_staleness"),
    ("recipe.clip=0.2", "recipe.clip: unknown key; the nearest one is recipe.clip_low"),
    ("recipe.epsilon=0.2", "recipe.epsilon: unknown key; docs/configuration.md lists all"),
    ("learner.clip_low=0.2", "learner.clip_low: unknown key; the nearest one is recipe.clip_low"),
    ("model.path=null", "model.path: Input should be a valid string"),
    ("lerner.lr=1", "lerner: unknown table; the nearest one is \\[learner\\]"),
    ("replay.max_staleness=-1", "replay.max_staleness"),
    ("replay.max_staleness=two", "replay.max_staleness"),
    ("nosuch.key=1", "nosuch: unknown table; there are model, task, "),
    ("learner.lr=inf", "learner.lr: Input should be a finite number"),
    ("sampling.temperature=nan", "sampling.temperature: Input should be a finite number"),
    ("recipe.delta=inf", "recipe.delta: Input should be a finite number"),
    ("learner.betas=[0.9, nan]", "learner.betas.1: Input should be a finite number"),
    ("sampling.logit_bias={a = inf}", "sampling.logit_bias.a: Input should be a finite number"),
    ("replay.endpoint=foo", "write it as tcp://ADDRESS:PORT"),
    ("replay.endpoint=tcp://127.0.0.1", "write it as tcp://ADDRESS:PORT"),
    ("replay.endpoint=tcp://127.0.0.1:99999", "a port of at most 65535"),
    ("max_staleness=2", "write it as table.key=value"),
])
def test_bad_settings_name_the_key(tmp_path: Path, setting: str, says: str) -> None:
    (tmp_path / "a.toml").write_text('[model]\npath = "m"\n[task]\ntrain = "t"\n')
    with pytest.raises(ValueError, match=says) as error:
        load([tmp_path / "a.toml"], [setting])
    assert "\n" not in str(error.value)


def test_a_missing_file_and_bad_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such config file"):
        load([tmp_path / "absent.toml"], [])
    with pytest.raises(ValueError, match="cannot be read as a config file \\(Is a directory\\)"):
        load([tmp_path], [])
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ValueError, match="not valid TOML"):
        load([tmp_path / "bad.toml"], [])


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "UPPER", "x" * 65, "a b"])
def test_bad_run_names(name: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        check_name(name)


def test_addresses_and_devices_are_not_shared() -> None:
    one = validate(tree(replay={"endpoint": "tcp://127.0.0.1:1"}, actor={"round_weights": "fp8"}))
    two = validate(tree())
    assert one.shared() == two.shared()
    assert validate(tree(replay={"max_staleness": 1})).shared() != two.shared()
