use super::*;

/// The known answers that are distributed with Random123, the authors' library.
#[test]
fn philox_gives_the_published_answers() {
    let mut counters = [[0; 4]; BLOCKS];
    counters[1] = [u32::MAX; 4];
    counters[2] = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    assert_eq!(philox4x32_10(&counters, [0; 2])[0], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox4x32_10(&counters, [u32::MAX; 2])[1], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    assert_eq!(
        philox4x32_10(&counters, [0xa409_3822, 0x299f_31d0])[2],
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

#[cfg(target_arch = "x86_64")]
#[test]
fn registers_have_the_same_blocks() {
    use crate::runtime::simd::InstructionSet;

    let mut word = 1_u64;
    for first in [0, 7, 1 << 31, u32::MAX - 16, u32::MAX - 7, u32::MAX] {
        for _ in 0..50 {
            word = crate::types::hash_id(word as i64);
            let (id, key) = (word, [(word >> 7) as u32, (word >> 29) as u32]);
            let expected = blocks_of(first, id, key);
            if InstructionSet::all().contains(&InstructionSet::Avx2) {
                // SAFETY: the CPU has AVX2.
                assert_eq!(unsafe { avx2::blocks_of(first, id, key) }, expected, "{first} {id} {key:?}");
            }
            if InstructionSet::all().contains(&InstructionSet::Avx512) {
                // SAFETY: the CPU has AVX-512 F.
                assert_eq!(unsafe { wide::blocks_of(first, id, key) }, expected, "{first} {id} {key:?}");
            }
        }
    }
}

#[test]
fn one_word_is_the_first_of_its_block() {
    assert_eq!(word([0; 4], [0; 2]), 0x6627_e8d5);
    assert_eq!(word([u32::MAX; 4], [u32::MAX; 2]), 0x408f_276d);
    assert_eq!(word([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]), 0xd16c_fe09);
}
