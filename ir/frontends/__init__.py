"""See DESIGN: ir/frontends."""
