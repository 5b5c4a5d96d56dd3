"""Changes how a module computes without sharding it: checkpointing, split backward, compile.

May import: kernels, config, models, numerics.  Read first: `activation_checkpoint`.
A new kind of linear (fp8, say) is a file here. `engine/initialize` applies it after `parallelize` and before
activation checkpointing and compile; its kernel goes to `kernels/`.
"""
