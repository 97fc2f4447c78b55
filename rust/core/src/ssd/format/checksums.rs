//! The checksums of many records of one length.
//!
//! A CPU with a crc32c instruction can start one per cycle, and has its result three cycles later. So the checksums of
//! four independent records are computed interleaved.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};

/// Records whose checksums are computed interleaved.
const CHECKSUM_LANES: usize = 4;

/// Calls `sink` with the position of each record and the crc32c of its bytes from offset `from`. All records have one
/// length.
pub(super) fn checksum_each<'a>(
    records: impl Iterator<Item = &'a [u8]>,
    from: usize,
    mut sink: impl FnMut(usize, u32),
) {
    let mut together: [&[u8]; CHECKSUM_LANES] = [&[]; CHECKSUM_LANES];
    let mut count = 0;
    for record in records {
        together[count % CHECKSUM_LANES] = &record[from..];
        count += 1;
        if count % CHECKSUM_LANES == 0 {
            let crcs = checksum_group(together);
            (count - CHECKSUM_LANES..).zip(crcs).for_each(|(at, crc)| sink(at, crc));
        }
    }
    let done = count / CHECKSUM_LANES * CHECKSUM_LANES;
    (done..count).zip(together).for_each(|(at, record)| sink(at, crc32c::crc32c(record)));
}

fn checksum_group(records: [&[u8]; CHECKSUM_LANES]) -> [u32; CHECKSUM_LANES] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") && records.iter().all(|record| record.len() == records[0].len()) {
        // SAFETY: the CPU has SSE 4.2.
        return unsafe { checksum_group_sse42(records) };
    }
    records.map(crc32c::crc32c)
}

/// Computes the checksums of records of one length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn checksum_group_sse42(records: [&[u8]; CHECKSUM_LANES]) -> [u32; CHECKSUM_LANES] {
    let words = records.map(|record| record.as_chunks::<8>());
    let [a, b, c, d] = words.map(|(words, _)| words);
    let mut crcs = [u64::from(u32::MAX); CHECKSUM_LANES];
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        crcs[0] = _mm_crc32_u64(crcs[0], u64::from_le_bytes(*a));
        crcs[1] = _mm_crc32_u64(crcs[1], u64::from_le_bytes(*b));
        crcs[2] = _mm_crc32_u64(crcs[2], u64::from_le_bytes(*c));
        crcs[3] = _mm_crc32_u64(crcs[3], u64::from_le_bytes(*d));
    }
    let mut results = [0; CHECKSUM_LANES];
    for ((result, crc), (_, rest)) in results.iter_mut().zip(crcs).zip(words) {
        *result = !rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte));
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_checksums_are_those_of_one_record_each() {
        let bytes: Vec<u8> = (0..9000_u32).map(|at| ((at * at) >> 3) as u8).collect();
        for len in [4, 5, 8, 11, 44, 63, 64, 300, 304, 1000] {
            for count in 0..=9 {
                let records = || bytes.chunks_exact(len).take(count);
                let mut found = Vec::new();
                checksum_each(records(), 4, |at, crc| found.push((at, crc)));
                let expected: Vec<(usize, u32)> =
                    records().map(|record| crc32c::crc32c(&record[4..])).enumerate().collect();
                assert_eq!(found, expected, "{count} records of {len} bytes");
            }
        }
        let uneven = [&bytes[..20], &bytes[..30], &bytes[..40], &bytes[..50]];
        assert_eq!(checksum_group(uneven), uneven.map(crc32c::crc32c));
    }
}
