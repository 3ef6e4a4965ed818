"""Checks the Ascend kernels without an NPU, with the vendor's compiler; ``python -m latentscan.tools.ascend_check``."""
