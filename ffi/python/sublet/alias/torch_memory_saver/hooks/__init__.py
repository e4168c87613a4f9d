"""The place of modules that other programs import by name."""
