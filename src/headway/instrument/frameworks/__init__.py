"""What one framework needs beyond an entry in a table: one module each, with its `MODULES`."""
