"""See DESIGN: ir/ops."""
