"""Tensor and sequence parallelism: roles, strategies, and the swapping of layers."""
