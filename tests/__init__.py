"""See DESIGN: tests."""
