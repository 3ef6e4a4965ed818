"""See DESIGN: ir."""
