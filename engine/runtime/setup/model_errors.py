"""The errors that keep a model from being served. The operator reads their messages: each says what to
change."""

from __future__ import annotations


class ModelError(Exception):
    """The base of these errors. Its message is complete: the command line prints it without a traceback."""


class ModelUnavailable(ModelError):
    """The directory or the hub's model does not exist, or cannot be reached."""


class UnsupportedModel(ModelError):
    """The model's family, or a setting of its config.json, is not implemented."""


class WeightsMismatch(ModelError):
    """The checkpoint does not hold the tensors that the configuration calls for. The message names them
    all."""


class DoesNotFit(ModelError):
    """The model, or the smallest useful KV cache, is larger than the memory."""


class BadRunnerConfig(ModelError):
    """A setting is out of range, or contradicts the model."""


class RankLost(ModelError):
    """A tensor-parallel rank died, is late or disagrees, so that no other rank can go on."""


class CollectiveFailed(Exception):
    """Another rank is gone, or cannot be reached. Only rank 0 knows which one, and names it in `RankLost`."""
