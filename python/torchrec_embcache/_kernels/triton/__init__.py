"""Triton kernels over the rows of device tiers, bitwise identical to the Rust kernels.

Every kernel performs the same IEEE additions, multiplications, divisions and square roots as the Rust kernels, in the same order.
`launch` compiles them with `enable_fp_fusion=False`, so that no multiplication is fused with an addition. They use `div_rn` and
`sqrt_rn`, because Triton's `/` and `sqrt` are approximations. Nothing is accumulated by atomics.

Shapes: T tables, all of one width D; F features; B bags per feature; N occurrences of ids; U distinct rows of all tables; C columns
of the pooled output; V = D * (1 + vector slots).

The modules import triton, which is optional if another backend is used. Triton reads the variable `TRITON_INTERPRET` when they are
imported: with 1 the kernels run in its interpreter, on CPU tensors.
"""
