"""The errors that latentscan raises on purpose.

A message says what happened, where (module path or file), the values involved, and what to do about it.
"""

from __future__ import annotations


class LatentscanError(Exception):
    """Base of all errors that latentscan raises on purpose.

    Args:
        what: what went wrong, with the actual values.
        where: module path, file or pass; empty if there is none.
        remedy: what the user can do; empty if nothing is known.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(str(self))

    def __str__(self) -> str:  # not the arguments: Dynamo writes advice of its own into those of what passes through it
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.remedy[0].upper()}{self.remedy[1:]}" if self.remedy else text

    def __reduce__(self):  # keyword arguments survive a trip between processes
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(cls, what, where, remedy):
    return cls(what, where=where, remedy=remedy)


class CaptureError(LatentscanError):
    """The model could not be traced to one graph."""


class PipelineError(LatentscanError):
    """A pipeline text, pass option or pass order is wrong."""


class RefusedError(LatentscanError):
    """A pass matched nothing, or a site that must be rewritten was refused."""


class VerifyError(LatentscanError):
    """A graph broke an invariant after a pass."""


class NumericsError(LatentscanError):
    """A pass moved the numbers by more than its tier allows."""


class MeshError(LatentscanError):
    """A device mesh does not fit the model or the machine."""


class CacheError(LatentscanError):
    """A cache was used in a way that it cannot serve."""


class KernelError(LatentscanError):
    """A kernel was called with arguments that it cannot take."""


class CheckpointError(LatentscanError):
    """A directory cannot be read from or written to."""
