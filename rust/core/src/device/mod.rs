//! The device tier.
