"""Arenas, chunks and placement of model state over device, host and disk."""
