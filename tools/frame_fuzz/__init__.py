"""Damaged tensor frames thrown at their readers: parts of `tools/fuzz_frames.py`."""
