"""The native library: C for the few loops that Python is too slow for, each with a pure twin of identical results.

Users ask `library()` and fall back to their twin on None; nothing fails for want of a compiler, and `status()` says which it is.
"""

from kvobj.native.load import NativeStatus, library, status

__all__ = ["NativeStatus", "library", "status"]
