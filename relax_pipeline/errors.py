"""Every error this software raises on purpose.

    RelaxError
    |- ConfigError            a setting, a file or an argument is wrong; the message says what to change
    |- DataError              a prompt file or a row of it cannot be used
    |- RewardError            a scorer cannot be built or breaks its contract
    |- ModelError             a model folder cannot be used for what was asked
    |- AdapterError           adapter tensors do not fit, are incomplete, or are not finite
    |- TrainerError           a trainer rank failed
    |- EngineError            a rollout engine failed or refused a request
    |  `- UnknownVersionError a request named a policy version this engine does not hold
    |- SyncError              an engine does not hold what the trainer sent
    |- CheckpointError        a checkpoint cannot be written, read, or does not match the run
    |- MergeError             base and adapter cannot be merged
    |- PublishError           an upload failed or what is there is not what was sent
    |- TrackingError          a service that draws curves failed; costs no training
    `- RunLockedError         another attempt is training this run

User errors say what was found, what was expected, and what to do. All carry one message string, so they survive
pickling between processes.
"""

from __future__ import annotations


class RelaxError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RelaxError):
    """A setting, a file or an argument is wrong."""


class DataError(RelaxError):
    """A prompt file or one of its rows cannot be used."""


class RewardError(RelaxError):
    """A scorer cannot be built or breaks its contract."""


class ModelError(RelaxError):
    """A model folder cannot be used for what was asked."""


class AdapterError(RelaxError):
    """Adapter tensors do not fit, are incomplete, or are not finite."""


class TrainerError(RelaxError):
    """A trainer rank failed."""


class EngineError(RelaxError):
    """A rollout engine failed or refused a request."""


class UnknownVersionError(EngineError):
    """A request named a policy version this engine does not hold."""


class SyncError(RelaxError):
    """An engine does not hold what the trainer sent."""


class CheckpointError(RelaxError):
    """A checkpoint cannot be written or read, or does not match the run."""


class MergeError(RelaxError):
    """Base and adapter cannot be merged."""


class PublishError(RelaxError):
    """An upload failed, or what is there is not what was sent."""


class TrackingError(RelaxError):
    """A service that draws curves failed."""


class RunLockedError(RelaxError):
    """Another attempt is training this run."""
