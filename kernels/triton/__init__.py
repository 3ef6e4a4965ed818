"""Kernels in plain Triton; they need triton only when they are imported."""
