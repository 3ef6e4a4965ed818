"""See DESIGN: tools."""
