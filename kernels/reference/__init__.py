"""See DESIGN: kernels/reference."""
