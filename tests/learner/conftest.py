"""Imported before any test module here, so that `learner` is there before transformers is (see `learner/torchvision_ops.py`)."""

import learner  # noqa: F401
