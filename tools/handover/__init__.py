"""Prefill, decode and what they share: the hand-over of a KV cache between two processes (`tools/demo_handover.py`)."""
