"""What the tests of whatif share: a tiny model, and the config of its batches."""

import pytest

from configs.schema import Config
from learner.logprobs import PolicyModel
from learner.model import load_policy
from tests.support.leases import tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tmp_path_factory.mktemp("model"), learner={"micro_batch_rows": 5}, sampling={"n": 4, "max_new_tokens": 6})


@pytest.fixture(scope="module")
def policy(config: Config) -> PolicyModel:
    return load_policy(config.model.path, "float32", "sdpa")
