"""See DESIGN: kernels."""
