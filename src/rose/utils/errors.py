"""The kinds of error that a person outside the program can cause.

Each message has four parts: what was asked, what was found, what is allowed, what to do.
"""

from __future__ import annotations


class RoseError(Exception):
    """Base of every error whose message is written for a person, never shown as a traceback."""


class ConfigError(RoseError):
    """A mistake in options, files or sizes, found at start; lists every problem at once."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used: missing, truncated, misshapen or unknown tensors."""


class InvarianceError(ConfigError):
    """The batch-invariant mode cannot be had here: kernels are missing, or this machine's products do not serve it."""


class ContractError(RoseError):
    """A kernel was bound to, or called with, something its contract does not allow."""
