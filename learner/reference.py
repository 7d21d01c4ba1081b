"""The frozen reference policy: one more copy of the weights on every rank, for inference only. It has its own column, never old's."""

import torch
from torch import Tensor, nn

from configs.schema import Config
from learner.logprobs import PolicyModel
from learner.model import load_policy
from wire.errors import ConfigError


class Reference:
    def __init__(self, policy: PolicyModel) -> None:
        self.policy = policy.requires_grad_(False)

    @property
    def head(self) -> nn.Module:
        return self.policy.model.get_output_embeddings()

    @torch.no_grad()
    def score(self, ids_BT: Tensor, temperature_B: Tensor, position_N: Tensor) -> Tensor:
        """Log-probs [N] of the token after each position."""
        return self.policy(ids_BT, temperature_B, position_N)

    @torch.no_grad()
    def hidden(self, ids_BT: Tensor, temperature_B: Tensor, position_N: Tensor) -> Tensor:
        """What goes into the head at each position, [N, H]."""
        return self.policy(ids_BT, temperature_B, position_N, lambda head, hidden_NH, target_N, temperature_N: hidden_NH)


def load_reference(config: Config, policy: PolicyModel) -> Reference | None:
    """What `learner.reference` names; None when it names nothing. ConfigError for a model over another vocabulary."""
    if config.learner.reference is None:
        return None
    initial = config.learner.reference == "initial"
    path, key = (config.model.path, "model.path") if initial else (config.learner.reference, "learner.reference")
    reference = load_policy(path, config.model.dtype, config.model.attention, key=key).to(config.learner.device)
    if reference.vocabulary != policy.vocabulary:
        raise ConfigError(f"learner.reference = {path!r} has a vocabulary of {reference.vocabulary} tokens, the policy of "
                          f"{policy.vocabulary}: a reference needs the policy's tokenizer")
    return Reference(reference)
