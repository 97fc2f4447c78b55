//! The counter-based random function under births: Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers:
//! as easy as 1, 2, 3; SC 2011).

/// A counter, or the random words it becomes.
pub(super) type Block = [u32; 4];

/// The blocks of `counters` under one key. Several at once, as one block is a chain of dependent multiplications.
#[inline]
pub(super) fn philox4x32_10<const N: usize>(counters: [Block; N], key: [u32; 2]) -> [Block; N] {
    let mut blocks = counters;
    for round in 0..10_u32 {
        let key_0 = key[0].wrapping_add(round.wrapping_mul(0x9e37_79b9));
        let key_1 = key[1].wrapping_add(round.wrapping_mul(0xbb67_ae85));
        for block in &mut blocks {
            let product_0 = u64::from(block[0]) * 0xd251_1f53;
            let product_1 = u64::from(block[2]) * 0xcd9e_8d57;
            *block = [
                (product_1 >> 32) as u32 ^ block[1] ^ key_0,
                product_1 as u32,
                (product_0 >> 32) as u32 ^ block[3] ^ key_1,
                product_0 as u32,
            ];
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that come with Random123.
    #[test]
    fn philox_gives_the_published_answers() {
        let counters = [[0; 4], [u32::MAX; 4], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]];
        assert_eq!(philox4x32_10(counters, [0; 2])[0], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10(counters, [u32::MAX; 2])[1], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32_10(counters, [0xa409_3822, 0x299f_31d0])[2],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn a_block_does_not_depend_on_its_company() {
        let counters: [Block; 7] = std::array::from_fn(|block| [block as u32, 1, 2, 3]);
        let together = philox4x32_10(counters, [4, 5]);
        for block in 0..7 {
            assert_eq!(philox4x32_10([counters[block]], [4, 5])[0], together[block]);
        }
    }
}
