"""Tensor codecs: frames of KV-cache tensors, for server and client alike. `codecs` is the way in; only the modules named for torch
and CuPy import them.

Imports nothing of the server. Kernels are compiled when kvobj is built; without them frames are parsed, and that is all.
"""
