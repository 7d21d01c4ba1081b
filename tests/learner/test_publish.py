"""Version folders: what is live is what is written, under names that transformers and SGLang know, and the probe says so."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from learner.coldstart import make_tokenizer
from learner.deepspeed_engine import digest_state
from learner.export import export
from learner.publish import Publisher, read_version
from tests.support.leases import make_engine, tiny_config
from wire.errors import ConfigError, TryAgainError, WeightsError
from wire.manifest import check_file, place_version, read_manifest, staged_path

pytestmark = pytest.mark.deepspeed


def make_model(folder: Path, *, tied: bool) -> Path:
    torch.manual_seed(3)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1, pad_token_id=0)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_version_loads_by_itself_and_holds_the_live_bits(tmp_path: Path, tied: bool, dtype: str) -> None:
    config = tiny_config(make_model(tmp_path / "model", tied=tied), model={"path": str(tmp_path / "model"), "dtype": dtype})
    engine = make_engine(config)
    publisher = Publisher(engine, tmp_path, tmp_path / "model", 14, 0)
    notice, state = publisher.publish(3, 2, 7)
    assert notice is not None
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [".v000003.e7"]  # replay takes it from there
    assert publisher.bytes == (tmp_path / "weights/.v000003.e7/model.safetensors").stat().st_size
    place_version(tmp_path, tmp_path / staged_path(3, 7), 3)
    folder = tmp_path / "weights/v000003"
    manifest = read_manifest(folder, notice)
    check_file(folder / "model.safetensors", manifest)
    assert (manifest.version, manifest.parent, manifest.kind) == (3, 2, "full")
    assert notice.weights_digest == digest_state(engine.full_state())
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {getattr(torch, dtype)}
    assert ("lm_head.weight" in manifest.tensors) == (not tied)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[name])
    if tied:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder).encode("98+1=") == [11, 10, 12, 3, 13]
    stored = read_version(tmp_path, 3)
    assert stored is not None
    assert stored[0] == notice.weights_digest


def test_the_probe_is_the_models_own_log_probs(tmp_path: Path) -> None:
    config = tiny_config(make_model(tmp_path / "model", tied=False))
    engine = make_engine(config)
    publisher = Publisher(engine, tmp_path, tmp_path / "model", 14, 0)
    probe = publisher.probe()
    assert len(probe.token_ids) == 64
    assert max(probe.token_ids) < 14
    ids = torch.tensor(probe.token_ids)
    with torch.no_grad():
        logits = engine.policy.model(ids[None]).logits[0].double()
    assert probe.logprobs == pytest.approx(logits.log_softmax(-1)[torch.arange(63), ids[1:]].tolist(), abs=2e-6)
    assert Publisher(engine, tmp_path, tmp_path / "model", 14, 0).probe() == probe
    assert Publisher(engine, tmp_path, tmp_path / "model", 14, 1).probe().token_ids != probe.token_ids


def test_a_stored_version_that_was_changed_is_refused_and_a_missing_one_is_none(tmp_path: Path) -> None:
    config = tiny_config(make_model(tmp_path / "model", tied=False))
    publisher = Publisher(make_engine(config), tmp_path, tmp_path / "model", 14, 0)
    publisher.publish(1, 0, 7)
    place_version(tmp_path, tmp_path / staged_path(1, 7), 1)
    file = tmp_path / "weights/v000001/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(1e-3)
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"the digest of model.norm.weight does not match"):
        read_version(tmp_path, 1)
    assert read_version(tmp_path, 2) is None


def test_a_learner_whose_folder_was_swept_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(make_model(tmp_path / "model", tied=False))
    publisher = Publisher(make_engine(config), tmp_path, tmp_path / "model", 14, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "write_model", lambda *_: shutil.rmtree(tmp_path / "weights"))
        with pytest.raises(TryAgainError, match="version 1 was published by a later learner"):
            publisher.publish(1, 0, 7)
    monkeypatch.setattr(publisher, "companions", {"no/such/folder": b""})
    with pytest.raises(FileNotFoundError):  # what goes wrong while the folder is there stays what it is
        publisher.publish(1, 0, 7)


def test_the_export_replaces_an_older_one_whole(tmp_path: Path) -> None:
    config = tiny_config(make_model(tmp_path / "model.start", tied=False))
    engine = make_engine(config)
    publisher = Publisher(engine, tmp_path, tmp_path / "model.start", 14, 0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/leftover").write_text("")
    export(publisher, tmp_path)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in engine.full_state().items())


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder .the demo's is made by"):
        make_engine(tiny_config(make_model(tmp_path / "model", tied=False), model={"path": str(tmp_path / "nothing")}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not load"):
        make_engine(tiny_config(tmp_path / "model", model={"path": str(tmp_path / "broken")}))


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        final_logit_softcapping=0.05)).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="changes its logits after the head"):
        make_engine(tiny_config(tmp_path / "model"))
