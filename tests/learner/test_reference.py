"""The reference policy, entropy and SIS through the real engine, against transformers' own logits in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.load import validate
from configs.schema import Config
from learner import distribution
from learner.advantage import zcpo_coefficients
from learner.batch import LeaseRows
from learner.deepspeed_engine import TrainEngine
from learner.distribution import ENTROPY, KL, LOG_PROB, AtTokens, WholeVocabulary
from learner.model import load_policy
from tests.support.leases import TABLES, anchored_by, column, make_engine, make_lease, tiny_config, update
from tests.support.tiny_model import make_tiny_model
from wire.errors import ConfigError, RunError

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("reference"), seed=5, hidden=32, layers=2)


def against(folder: Path, other: Path, recipe: dict[str, Any], **learner: Any) -> Config:
    tiny_config(folder)
    tables = {**TABLES, "recipe": {**TABLES["recipe"], **recipe}, "learner": {**TABLES["learner"], "reference": str(other), **learner}}
    return validate({"model": {"path": str(folder)}, **tables})


def logs(model: Any, lease: LeaseRows) -> list[torch.Tensor]:
    """Per response: log-softmax [T, V] at the recorded temperature, float64."""
    found = []
    for head, payload in zip(lease.heads, lease.payloads, strict=True):
        ids = torch.from_numpy(np.concatenate([payload.prompt_ids, payload.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / head.sampling.temperature
        found.append(logits.log_softmax(-1)[head.prompt_len - 1 : -1])
    return found


def kls(engine: TrainEngine, lease: LeaseRows) -> list[torch.Tensor]:
    assert engine.reference is not None
    return [(cur.exp() * (cur - ref)).sum(-1)
            for cur, ref in zip(logs(engine.policy.model, lease), logs(engine.reference.policy.model, lease), strict=True)]


def test_the_column_is_the_references_and_old_is_not(folder: Path, other: Path) -> None:
    config = against(folder, other, {"kl": 0.1, "entropy": 0.0, "kl_estimator": "full"})
    engine = make_engine(config)
    lease = anchored_by(engine, make_lease(config))
    entropy = torch.cat([-(log.exp() * log).sum(-1) for log in logs(engine.policy.model, lease)])
    kl = torch.cat(kls(engine, lease))
    outcome = update(engine, config, lease)
    plain = [log.gather(-1, torch.from_numpy(payload.response_ids.astype(np.int64))[:, None])[:, 0].numpy()
             for log, payload in zip(logs(load_policy(str(other), "float32", "sdpa").model, lease), lease.payloads, strict=True)]
    assert column(outcome, "ref") == pytest.approx(np.concatenate(plain), abs=2e-5)
    assert np.abs(column(outcome, "ref") - column(outcome, "old")).mean() > 0.1
    assert outcome.metrics["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert outcome.metrics["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-4)


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_kl_in_the_loss_draws_the_policy_to_the_reference(folder: Path, other: Path, estimator: str) -> None:
    """And twice the coefficient adds twice the loss."""
    ends = {}
    for kl in (0.0, 5.0):
        config = against(folder, other, {"kl": kl, "kl_estimator": estimator}, lr=3e-3)
        engine = make_engine(config)
        lease = anchored_by(engine, make_lease(config))
        for _ in range(6):
            update(engine, config, lease)
        ends[kl] = float(torch.cat(kls(engine, lease)).mean())
    assert ends[5.0] < 0.9 * ends[0.0]
    losses = []
    for kl in (0.0, 1.0, 2.0):
        config = against(folder, other, {"kl": kl, "kl_estimator": estimator})
        engine = make_engine(config)
        losses.append(update(engine, config, anchored_by(engine, make_lease(config))).steps[0]["loss"])
    assert losses[1] > losses[0]
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-4)


def test_the_kl_has_its_own_mask_and_weight(folder: Path, other: Path) -> None:
    """Everything is masked for the objective but one group; the KL still reads every token, unless told otherwise."""
    def loss(**recipe: Any) -> float:
        config = against(folder, other, {"kl": 1.0, "engine": "icepop", "engine_low": 0.9, "engine_high": 1.1, **recipe})
        engine = make_engine(config)
        lease = anchored_by(engine, make_lease(config))
        for index, head in enumerate(lease.heads):
            mu = lease.anchors[head.rollout_id, 0].values - np.float32(0.5 if index >= 4 else 0.0)
            lease.payloads[index] = lease.payloads[index]._replace(mu=mu)
        outcome = update(engine, config, lease)
        per_token = np.expm1(column(outcome, "ref") - column(outcome, "cur")) - (column(outcome, "ref") - column(outcome, "cur"))
        keep = column(outcome, "keep") == 1
        assert 0 < keep.sum() < len(keep)
        weight = np.where(keep, 1.0, np.exp(0.5))
        return {"plain": outcome.steps[0]["loss"], "all": per_token.mean(), "kept": per_token[keep].mean(),
                "weighed": (per_token * weight).mean()}  # type: ignore[return-value]

    zero = loss(kl=1e-9)["plain"]  # type: ignore[index]
    for recipe, name in (({}, "all"), ({"kl_mask": "kept"}, "kept"), ({"kl_weight": "total"}, "weighed")):
        found: Any = loss(**recipe)
        assert found["plain"] - zero == pytest.approx(found[name], rel=1e-3)


def test_an_entropy_bonus_keeps_the_policy_wider(folder: Path) -> None:
    ends = {}
    for bonus in (0.0, 5.0):
        config = tiny_config(folder, recipe={"entropy": bonus}, learner={"lr": 3e-3})
        engine = make_engine(config)
        lease = anchored_by(engine, make_lease(config))
        for _ in range(6):
            metrics = update(engine, config, lease).metrics
        ends[bonus] = metrics["entropy"]
    assert ends[5.0] > ends[0.0] + 0.05


def test_zcpo_reads_the_whole_vocabulary(folder: Path, other: Path) -> None:
    config = against(folder, other, {"estimator": "zcpo", "zcpo_beta": 2.0})
    engine = make_engine(config)
    lease = anchored_by(engine, make_lease(config))
    mean = torch.stack([kl.mean() for kl in kls(engine, lease)])
    rewards = torch.tensor([head.verdict.reward for head in lease.heads], dtype=torch.float64)  # type: ignore[union-attr]
    expected = zcpo_coefficients(rewards, torch.tensor(lease.group_of), mean, beta=2.0)
    outcome = update(engine, config, lease)
    assert column(outcome, "start_kl") == pytest.approx(torch.cat(kls(make_engine(config), lease)).numpy(), rel=1e-3, abs=1e-5)
    lens = np.array([head.response_len for head in lease.heads])
    assert outcome.steps[0]["loss"] == pytest.approx(float((-expected.numpy() * lens).sum() / lens.sum()), abs=1e-4)  # cur/old = 1
    assert update(engine, config, make_lease(config, rewards=[1.0] * 16)).skipped


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    Qwen2ForCausalLM(Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 num_key_value_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a vocabulary of 50 tokens, the policy of 48"):
        make_engine(against(folder, tmp_path, {}))


# ---------------------------------------------------------------- SIS
def sis_config(folder: Path, **recipe: Any) -> Config:
    return tiny_config(folder, recipe={"staleness": "sis", **recipe}, sampling={**TABLES["sampling"], "top_logprobs": 4})


def as_sampled_by(engine: TrainEngine, lease: LeaseRows, shift: float) -> LeaseRows:
    """mu and top log-probs are the live policy's, the sampled token's moved by `shift`."""
    for index, (log, payload) in enumerate(zip(logs(engine.policy.model, lease), lease.payloads, strict=True)):
        top = log.gather(-1, torch.from_numpy(payload.top_ids.astype(np.int64))).numpy()
        top[:, 0] += shift
        lease.payloads[index] = payload._replace(mu=top[:, 0].astype(np.float32), top_logprobs=top.astype(np.float32))
    return anchored_by(engine, lease)


def test_sis_accepts_what_the_policy_still_says_and_less_of_what_it_says_less(folder: Path) -> None:
    """Swapping the two policies turns it over: where the sampled token became likelier, all of them are accepted."""
    shares = {}
    config = sis_config(folder, engine="icepop", engine_low=0.01, engine_high=100.0)
    for shift in (1.0, 1e-4, -1.0):  # > 0: the policy now says it e^-1 times as often
        engine = make_engine(config)
        outcome = update(engine, config, as_sampled_by(engine, make_lease(config), shift))
        accepted, weight = column(outcome, "accepted") == 1, column(outcome, "weight")
        assert outcome.metrics["sis_accepted"] == pytest.approx(accepted.mean())
        assert (weight[accepted] == 1).all()  # the total ratio is in the draw: no engine weight beside it
        assert weight[~accepted] == pytest.approx(np.full(int((~accepted).sum()), np.exp(-shift)), rel=1e-3)
        shares[shift] = accepted.mean()
    assert shares[1.0] == pytest.approx(np.exp(-1), abs=0.15)
    assert shares[1e-4] > 0.95
    assert shares[-1.0] == 1.0


def test_sis_draws_the_same_again_and_needs_its_tokens(folder: Path) -> None:
    config = sis_config(folder)
    first, again = (update(engine, config, as_sampled_by(engine, make_lease(config), 0.5))
                    for engine in (make_engine(config), make_engine(config)))
    assert column(first, "accepted").tolist() == column(again, "accepted").tolist()
    with pytest.raises(RunError, match="holds 0 top log-probs per token, SIS needs 4"):
        update(make_engine(config), config, make_lease(tiny_config(folder)))


# ---------------------------------------------------------------- the head's terms
def test_terms_have_the_plain_values_and_gradients_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head, other = torch.nn.Linear(6, 9, bias=False).double(), torch.nn.Linear(6, 9, bias=False).double()
    hidden, ref = torch.randn(7, 6, dtype=torch.float64, requires_grad=True), torch.randn(7, 6, dtype=torch.float64)
    target, temperature = torch.randint(9, (7,)), torch.rand(7, dtype=torch.float64) + 0.5
    monkeypatch.setattr(distribution, "log_softmax", lambda head, hidden, t: (head(hidden) / t[:, None]).log_softmax(-1))
    log = (head(hidden) / temperature[:, None]).log_softmax(-1)
    log_ref = (other(ref) / temperature[:, None]).log_softmax(-1).detach()
    plain = torch.stack([log[torch.arange(7), target], -(log.exp() * log).sum(-1), (log.exp() * (log - log_ref)).sum(-1)])
    mix = torch.randn(3, 7, dtype=torch.float64)
    wanted = torch.autograd.grad((plain * mix).sum(), [hidden, head.weight])
    for chunk in (1000, 18, 9):
        monkeypatch.setattr(distribution, "CHUNK", chunk)
        found = WholeVocabulary(other, ref)(head, hidden, target, temperature)
        assert torch.allclose(found, plain, rtol=1e-12)
        for got, want in zip(torch.autograd.grad((found * mix).sum(), [hidden, head.weight]), wanted, strict=True):
            assert torch.allclose(got, want, rtol=1e-10)
        tokens = torch.randint(9, (7, 4))
        assert torch.allclose(AtTokens(tokens)(head, hidden, target, temperature), log.gather(-1, tokens).T)
    assert (LOG_PROB, ENTROPY, KL) == (0, 1, 2)
    assert not WholeVocabulary()(head, hidden, target, temperature)[KL].any()
