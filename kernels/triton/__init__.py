"""Kernels in Triton and Gluon. Same signatures as kernels/reference; no graph code."""
