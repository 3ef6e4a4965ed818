"""See DESIGN: runtime."""
