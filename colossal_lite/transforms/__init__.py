"""Changes how a module computes without sharding it: checkpointing, split backward, compile.

May import: kernels, config, models, numerics.  Read first: `activation_checkpoint`.
A new kind of linear (fp8, say) is a file here. `_swap_layers` of `engine/initialize` calls it, after `parallelize` and
before activation checkpointing and compile. Its kernel goes to `kernels/`. With a tensor axis the linears are those of
`layers/tensor_1d_layers` or `layers/grid_layers`, which multiply themselves: the new kind is called there too.
"""
