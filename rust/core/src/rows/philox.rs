//! Philox4x32 with 10 rounds, the counter-based random function that births use. Source: Salmon, Moraes, Dror, Shaw, "Parallel
//! random numbers: as easy as 1, 2, 3", SC 2011.

/// A counter, or the four random words that it is turned into.
pub(crate) type Block = [u32; 4];

/// The number of blocks that are computed at once, in the lanes of vector registers.
pub(super) const BLOCKS: usize = 16;

/// The random blocks of `BLOCKS` counters under one key.
#[inline(always)]
#[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for every instruction set; see `simd`.
pub(super) fn philox4x32_10(counters: &[Block; BLOCKS], key: [u32; 2]) -> [Block; BLOCKS] {
    // The words are regrouped by their position in the block, so that each array fills vector lanes.
    let mut words = [[0_u32; BLOCKS]; 4];
    for block in 0..BLOCKS {
        for word in 0..4 {
            words[word][block] = counters[block][word];
        }
    }
    for round in 0..10_u32 {
        let key_0 = key[0].wrapping_add(round.wrapping_mul(0x9e37_79b9));
        let key_1 = key[1].wrapping_add(round.wrapping_mul(0xbb67_ae85));
        let [words_0, words_1, words_2, words_3] = words;
        for block in 0..BLOCKS {
            let product_0 = u64::from(words_0[block]) * 0xd251_1f53;
            let product_1 = u64::from(words_2[block]) * 0xcd9e_8d57;
            words[0][block] = (product_1 >> 32) as u32 ^ words_1[block] ^ key_0;
            words[1][block] = product_1 as u32;
            words[2][block] = (product_0 >> 32) as u32 ^ words_3[block] ^ key_1;
            words[3][block] = product_0 as u32;
        }
    }
    let mut blocks = [[0; 4]; BLOCKS];
    for block in 0..BLOCKS {
        for word in 0..4 {
            blocks[block][word] = words[word][block];
        }
    }
    blocks
}

/// The first random word of one counter.
pub(crate) fn word(counter: Block, key: [u32; 2]) -> u32 {
    let [mut a, mut b, mut c, mut d] = counter;
    for round in 0..10_u32 {
        let key_0 = key[0].wrapping_add(round.wrapping_mul(0x9e37_79b9));
        let key_1 = key[1].wrapping_add(round.wrapping_mul(0xbb67_ae85));
        let product_0 = u64::from(a) * 0xd251_1f53;
        let product_1 = u64::from(c) * 0xcd9e_8d57;
        (a, b, c, d) = (
            (product_1 >> 32) as u32 ^ b ^ key_0,
            product_1 as u32,
            (product_0 >> 32) as u32 ^ d ^ key_1,
            product_0 as u32,
        );
    }
    a
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn one_word_is_the_first_of_its_block() {
        assert_eq!(word([0; 4], [0; 2]), 0x6627_e8d5);
        assert_eq!(word([u32::MAX; 4], [u32::MAX; 2]), 0x408f_276d);
        assert_eq!(word([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]), 0xd16c_fe09);
    }
}
