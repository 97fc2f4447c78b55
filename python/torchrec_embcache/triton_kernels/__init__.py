"""Triton kernels over the rows of device tiers, with the bits of the Rust core's kernels.

Every kernel does the core's IEEE additions, multiplications, divisions and square roots in the core's order. `launch` compiles them
with `enable_fp_fusion=False`, so that no multiplication is fused with an addition. They divide and take roots by `div_rn` and
`sqrt_rn`, because Triton's `/` and `sqrt` are approximations. Nothing is added up by atomics.

Shapes: T tables, all of one width D; F features; B bags a feature; N occurrences of ids; U distinct rows of all tables; C columns
of the pooled output; V = D * (1 + vector slots).

The modules import triton, which need not be installed where another backend serves. Triton reads the variable `TRITON_INTERPRET`
when they are imported: with 1 the kernels run in its interpreter, on CPU tensors.
"""
