"""Kernels of the tensor codecs: one source for CPU and GPU, its build, and the launchers that run it."""
