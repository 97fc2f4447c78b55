//! Access tokens: proofs that no kernel uses the rows that are about to be read or written.
//!
//! The table's lock excludes all code except kernels, which use the rows of pinned slots of their plan without that
//! lock. So a row of the arena is read through a [`ReadAccess`] and written through a [`WriteAccess`], and there are
//! few ways to get either.

use std::marker::PhantomData;

use crate::types::CacheSlot;

/// Proof that no kernel writes a row of the host tier during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoKernelWrites<'a>(PhantomData<&'a ()>);

impl<'a> NoKernelWrites<'a> {
    /// Creates the token on the caller's guarantee.
    ///
    /// # Safety
    /// During `'a` no kernel writes a row of the host tier that the token is used with.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn promise() -> Self {
        Self(PhantomData)
    }

    /// Read access to the row in a slot.
    #[inline]
    pub(crate) fn read_access(self, slot: CacheSlot) -> ReadAccess<'a> {
        ReadAccess { slot, proof: self.0 }
    }
}

/// A slot of the host tier whose row no kernel writes during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadAccess<'a> {
    slot: CacheSlot,
    proof: PhantomData<&'a ()>,
}

impl ReadAccess<'_> {
    #[inline]
    pub(crate) fn slot(self) -> CacheSlot {
        self.slot
    }
}

/// A slot of the host tier whose row no kernel reads or writes: it is empty, or no plan has pinned it, or the table's
/// kernels run on the device tier. It is created under the table's lock and used before that lock is released, because
/// only a plan that has the lock can pin. So it never leaves the operation of the placement that created it:
/// `tools/lint/layers.py` rejects it in any other module.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WriteAccess(CacheSlot);

impl WriteAccess {
    /// Only the host tier creates these, after checking.
    pub(super) fn new(slot: CacheSlot) -> Self {
        Self(slot)
    }

    #[inline]
    pub(crate) fn slot(&self) -> CacheSlot {
        self.0
    }

    /// Unused rows may be read.
    #[inline]
    pub(crate) fn read_access(&self) -> ReadAccess<'_> {
        ReadAccess { slot: self.0, proof: PhantomData }
    }
}
