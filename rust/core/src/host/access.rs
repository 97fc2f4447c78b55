//! Proofs that no kernel touches the rows that somebody is about to read or write.
//!
//! The table's lock keeps out everybody but kernels: they use the rows of slots that their plan has pinned, without that lock. So a row of
//! the arena is read through a [`ReadAccess`] slot and written through an [`Idle`] one, and there are few ways to get either.

use std::marker::PhantomData;

use crate::types::CacheSlot;

/// Proof that no kernel writes a row of the host tier during `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoKernelWrites<'a>(PhantomData<&'a ()>);

impl<'a> NoKernelWrites<'a> {
    /// The caller's word for it.
    ///
    /// # Safety
    /// During `'a` no kernel writes a row of the host tier that the proof is used with.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn promise() -> Self {
        Self(PhantomData)
    }

    /// A slot whose row may be read.
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

/// A slot of the host tier whose row no kernel reads or writes: it is empty, or no plan has pinned it, or the table's kernels run on the
/// device tier. It is made under the table's lock and used before that lock is given up, since only a plan that has the lock can pin.
/// So it never leaves the operation of the residency that made it: `tests/python/test_tree.py` refuses it in any other module.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WriteAccess(CacheSlot);

impl WriteAccess {
    /// Only the host tier makes these, once it has looked.
    pub(super) fn new(slot: CacheSlot) -> Self {
        Self(slot)
    }

    #[inline]
    pub(crate) fn slot(&self) -> CacheSlot {
        self.0
    }

    /// What nobody uses may be read.
    #[inline]
    pub(crate) fn read_access(&self) -> ReadAccess<'_> {
        ReadAccess { slot: self.0, proof: PhantomData }
    }
}
