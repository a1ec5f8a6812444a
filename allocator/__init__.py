"""Who holds which KV blocks: one exact allocator per replica, behind `allocator.interface`."""

from allocator.factory import make_allocator

__all__ = ["make_allocator"]
