//! Selects the ids of the sample.
#![allow(clippy::inline_always)] // jobs and their callees are compiled for each instruction set

use crate::index::IdHash;
use crate::simd::{InstructionSet, SimdJob};
use crate::types::Id;

/// Selects evenly from ids that are close together.
const HASH: IdHash = IdHash::new(0x9e37_79b9_7f4a_7c15);
/// Excludes that a small id, which may be a frequent one, is in every sample.
const SALT: Id = 0x5851_f42d_4c95_7f2d;
/// Number of ids that are compared together.
const AT_ONCE: usize = 16;

/// The hashes below `hash_bound`, and the positions of their ids.
pub(super) fn sampled_ids(ids: &[Id], hash_bound: u64) -> Vec<(u64, u32)> {
    InstructionSet::best().run(SampleJob { ids, hash_bound })
}

struct SampleJob<'a> {
    ids: &'a [Id],
    hash_bound: u64,
}

#[inline(always)]
fn hash(id: Id) -> u64 {
    HASH.once(id ^ SALT)
}

impl SimdJob for SampleJob<'_> {
    type Output = Vec<(u64, u32)>;

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut found = Vec::new();
        let (parts, rest) = self.ids.as_chunks::<AT_ONCE>();
        for (number, part) in parts.iter().enumerate() {
            // Mostly no id is selected. The lanes have no branch, so that they are compared together.
            let mut any = false;
            for &id in part {
                any |= hash(id) < self.hash_bound;
            }
            if any {
                self.add(part, number * AT_ONCE, &mut found);
            }
        }
        self.add(rest, parts.len() * AT_ONCE, &mut found);
        found
    }
}

impl SampleJob<'_> {
    #[inline(always)]
    fn add(&self, ids: &[Id], begin: usize, found: &mut Vec<(u64, u32)>) {
        for (at, &id) in ids.iter().enumerate() {
            let hash = hash(id);
            if hash < self.hash_bound {
                found.push((hash, (begin + at) as u32));
            }
        }
    }
}
