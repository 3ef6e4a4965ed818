"""See DESIGN: lowering."""
