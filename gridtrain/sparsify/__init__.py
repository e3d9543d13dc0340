"""Which gradient elements travel, and what becomes of those that do not."""
