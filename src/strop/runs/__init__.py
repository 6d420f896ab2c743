"""The run directory: written by one process, read by anyone. Nothing is imported here; name the module you need."""
