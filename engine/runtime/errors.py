"""What can keep a model from being served. The operator reads these messages, so each says what to change."""

from __future__ import annotations


class ModelError(Exception):
    """Base. The message is complete: the command line prints it without a traceback."""


class ModelUnavailable(ModelError):
    """No such directory, no such model on the hub, or no way to reach it."""


class UnsupportedModel(ModelError):
    """The architecture, or something that its config.json asks for, is not implemented."""


class WeightsMismatch(ModelError):
    """The checkpoint does not hold the tensors that the configuration calls for. Names them all."""


class DoesNotFit(ModelError):
    """The model, or the smallest useful KV cache, is larger than the memory."""


class BadRunnerConfig(ModelError):
    """A setting contradicts the model, the machine or another setting."""


class RankLost(ModelError):
    """A tensor-parallel rank died, is late or disagrees: none of the others can go on."""


class CollectiveFailed(Exception):
    """Another rank is gone, or cannot be reached. Which one, only rank 0 can say, by `RankLost`."""
