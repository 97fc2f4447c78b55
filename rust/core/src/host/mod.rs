//! The host tier.
