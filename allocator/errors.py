"""The allocator's error tree. Each is a mistake of the caller; a lack of blocks is no error, it is None."""

from __future__ import annotations


class AllocatorError(Exception):
    """Base of everything that the allocator raises on purpose."""


class LeaseError(AllocatorError):
    """A lease was used after its release, or with an allocator that did not grant it."""


class ArgumentError(AllocatorError, ValueError):
    """A length or an array does not fit the call; the message names the value and the limit."""
