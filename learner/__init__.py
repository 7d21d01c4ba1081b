"""The DeepSpeed side: old log-probs, advantages, objective, update, publish, checkpoint, rerun."""

from learner.torchvision_ops import install

install()
