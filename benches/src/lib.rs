//! What the benches share: the workloads, the interleaved measurement and the limits.
