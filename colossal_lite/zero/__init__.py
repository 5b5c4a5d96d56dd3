"""Sharded training state over chunks: gradients summed while backward runs, the optimizer on flat ranges."""
