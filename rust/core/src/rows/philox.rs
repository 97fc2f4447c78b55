//! Philox4x32 with 10 rounds, the counter-based random function of initial weights. Source: Salmon, Moraes, Dror, Shaw,
//! "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#![allow(unsafe_code)]

/// A counter, or its four random words.
pub(crate) type PhiloxBlock = [u32; 4];

/// The number of blocks that are computed together, in the lanes of vector registers.
pub(super) const BLOCKS: usize = 16;
/// The multipliers of the first and the third word in each round.
const TIMES: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The increments of the key's words after each round.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The random blocks of the `BLOCKS` counters `(first, 0, low half of id, high half of id)`, `(first + 1, ...)` and so
/// on.
#[inline(always)]
#[allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.
pub(super) fn blocks_of(first: u32, id: u64, key: [u32; 2]) -> [PhiloxBlock; BLOCKS] {
    let mut counters = [[0, 0, id as u32, (id >> 32) as u32]; BLOCKS];
    for (block, counter) in (0..).zip(&mut counters) {
        counter[0] = first.wrapping_add(block);
    }
    philox4x32_10(&counters, key)
}

/// The random blocks of `BLOCKS` counters under one key.
#[inline(always)]
#[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for every instruction set; see `simd`.
fn philox4x32_10(counters: &[PhiloxBlock; BLOCKS], key: [u32; 2]) -> [PhiloxBlock; BLOCKS] {
    // The words are regrouped by their position in the block, so that each array fills vector lanes.
    let mut words = [[0_u32; BLOCKS]; 4];
    for block in 0..BLOCKS {
        for word in 0..4 {
            words[word][block] = counters[block][word];
        }
    }
    for round in 0..10_u32 {
        let key_0 = key[0].wrapping_add(round.wrapping_mul(WEYL[0]));
        let key_1 = key[1].wrapping_add(round.wrapping_mul(WEYL[1]));
        let [words_0, words_1, words_2, words_3] = words;
        for block in 0..BLOCKS {
            let product_0 = u64::from(words_0[block]) * u64::from(TIMES[0]);
            let product_1 = u64::from(words_2[block]) * u64::from(TIMES[1]);
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

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2 {
    //! The same function with AVX2.

    use std::arch::x86_64::{
        __m256i, _mm256_add_epi32, _mm256_blend_epi32, _mm256_mul_epu32, _mm256_set_epi64x, _mm256_set1_epi32,
        _mm256_setzero_si256, _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64,
        _mm256_xor_si256,
    };

    use super::{BLOCKS, PhiloxBlock, TIMES, WEYL};

    /// The indexes of a register's blocks, 64 bits each, in the order that [`by_block`] restores.
    const ORDER: [i64; 4] = [0, 2, 1, 3];
    /// Registers for each word of all blocks.
    const REGISTERS: usize = BLOCKS / ORDER.len();

    /// See [`super::blocks_of`].
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(in super::super) fn blocks_of(first: u32, id: u64, key: [u32; 2]) -> [PhiloxBlock; BLOCKS] {
        let mut blocks = [[_mm256_setzero_si256(); 2]; REGISTERS];
        for (number, blocks) in blocks.iter_mut().enumerate() {
            let [a, b, c, d] = ORDER;
            let order = _mm256_set_epi64x(d, c, b, a);
            let from = _mm256_set1_epi32((first as i32).wrapping_add((number * ORDER.len()) as i32));
            let counters = [
                _mm256_add_epi32(order, from),
                _mm256_setzero_si256(),
                _mm256_set1_epi32(id as i32),
                _mm256_set1_epi32((id >> 32) as i32),
            ];
            *blocks = by_block(rounds(counters, key));
        }
        // SAFETY: both are 256 bytes, of which any are valid.
        unsafe { std::mem::transmute::<[[__m256i; 2]; REGISTERS], [PhiloxBlock; BLOCKS]>(blocks) }
    }

    /// The words after ten rounds. A word is in the lower half of its 64 bits, because products read only that half.
    /// The upper half is undefined.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn rounds(mut words: [__m256i; 4], key: [u32; 2]) -> [__m256i; 4] {
        let times = TIMES.map(|times| _mm256_set1_epi32(times as i32));
        let weyl = WEYL.map(|weyl| _mm256_set1_epi32(weyl as i32));
        let mut key = key.map(|key| _mm256_set1_epi32(key as i32));
        for _ in 0..10 {
            let (product_0, product_1) = (_mm256_mul_epu32(words[0], times[0]), _mm256_mul_epu32(words[2], times[1]));
            words = [
                _mm256_xor_si256(_mm256_xor_si256(words[1], key[0]), upper(product_1)),
                product_1,
                _mm256_xor_si256(_mm256_xor_si256(words[3], key[1]), upper(product_0)),
                product_0,
            ];
            key = [_mm256_add_epi32(key[0], weyl[0]), _mm256_add_epi32(key[1], weyl[1])];
        }
        words
    }

    /// Moves the upper halves of products to the lower halves.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn upper(product: __m256i) -> __m256i {
        _mm256_shuffle_epi32::<0xf5>(product)
    }

    /// Regroups words by block. Each argument has the words of one position in the blocks.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn by_block([a, b, c, d]: [__m256i; 4]) -> [__m256i; 2] {
        let pair = |low, high| _mm256_blend_epi32::<0xaa>(low, _mm256_slli_epi64::<32>(high));
        let (ab, cd) = (pair(a, b), pair(c, d));
        [_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd)]
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod wide {
    //! The same function with AVX-512.

    use std::arch::x86_64::{
        __m512i, _mm512_add_epi32, _mm512_mask_blend_epi32, _mm512_mul_epu32, _mm512_permutex2var_epi64,
        _mm512_set_epi32, _mm512_set_epi64, _mm512_set1_epi32, _mm512_setzero_si512, _mm512_slli_epi64,
        _mm512_srli_epi64, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
        _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
    };

    use super::{BLOCKS, PhiloxBlock, TIMES, WEYL};

    /// Mask of the lanes with odd indexes.
    const ODD: u16 = 0xaaaa;
    /// Truth table of the exclusive or of three values.
    const XOR: i32 = 0x96;

    /// See [`super::blocks_of`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in super::super) fn blocks_of(first: u32, id: u64, key: [u32; 2]) -> [PhiloxBlock; BLOCKS] {
        let numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        // Each register has one word of all blocks.
        let mut words = [
            _mm512_add_epi32(_mm512_set1_epi32(first as i32), numbers),
            _mm512_setzero_si512(),
            _mm512_set1_epi32(id as i32),
            _mm512_set1_epi32((id >> 32) as i32),
        ];
        let (times_0, times_1) = (_mm512_set1_epi32(TIMES[0] as i32), _mm512_set1_epi32(TIMES[1] as i32));
        for round in 0..10_u32 {
            let key_0 = _mm512_set1_epi32(key[0].wrapping_add(round.wrapping_mul(WEYL[0])) as i32);
            let key_1 = _mm512_set1_epi32(key[1].wrapping_add(round.wrapping_mul(WEYL[1])) as i32);
            let (high_0, low_0) = product(words[0], times_0);
            let (high_1, low_1) = product(words[2], times_1);
            words = [
                _mm512_ternarylogic_epi32::<XOR>(high_1, words[1], key_0),
                low_1,
                _mm512_ternarylogic_epi32::<XOR>(high_0, words[3], key_1),
                low_0,
            ];
        }
        by_block(words)
    }

    /// The upper and the lower halves of the products of all lanes.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn product(words: __m512i, times: __m512i) -> (__m512i, __m512i) {
        let even = _mm512_mul_epu32(words, times);
        let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(words), times);
        (
            _mm512_mask_blend_epi32(ODD, _mm512_srli_epi64::<32>(even), odd),
            _mm512_mask_blend_epi32(ODD, even, _mm512_slli_epi64::<32>(odd)),
        )
    }

    /// Regroups words by block. Each argument has the words of one position in the blocks.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn by_block([a, b, c, d]: [__m512i; 4]) -> [PhiloxBlock; BLOCKS] {
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        // Register i has blocks i, i + 4, i + 8 and i + 12.
        let every_fourth = [
            _mm512_unpacklo_epi64(ab_low, cd_low),
            _mm512_unpackhi_epi64(ab_low, cd_low),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ];
        // Indexes that select the lower, or the upper, 256 bits of each of two registers.
        let lower = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        let upper = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        let [r0, r1, r2, r3] = every_fourth;
        // Blocks 0, 1, 4, 5; then 2, 3, 6, 7; then the same for blocks 8 to 15.
        let pairs = [
            _mm512_permutex2var_epi64(r0, lower, r1),
            _mm512_permutex2var_epi64(r2, lower, r3),
            _mm512_permutex2var_epi64(r0, upper, r1),
            _mm512_permutex2var_epi64(r2, upper, r3),
        ];
        let first = _mm512_set_epi64(11, 10, 9, 8, 3, 2, 1, 0);
        let second = _mm512_set_epi64(15, 14, 13, 12, 7, 6, 5, 4);
        let ordered = [
            _mm512_permutex2var_epi64(pairs[0], first, pairs[1]),
            _mm512_permutex2var_epi64(pairs[0], second, pairs[1]),
            _mm512_permutex2var_epi64(pairs[2], first, pairs[3]),
            _mm512_permutex2var_epi64(pairs[2], second, pairs[3]),
        ];
        // SAFETY: both are 256 bytes, of which any are valid.
        unsafe { std::mem::transmute::<[__m512i; 4], [PhiloxBlock; BLOCKS]>(ordered) }
    }
}

/// The first random word of one counter.
pub(crate) fn word(counter: PhiloxBlock, key: [u32; 2]) -> u32 {
    let [mut a, mut b, mut c, mut d] = counter;
    for round in 0..10_u32 {
        let key_0 = key[0].wrapping_add(round.wrapping_mul(WEYL[0]));
        let key_1 = key[1].wrapping_add(round.wrapping_mul(WEYL[1]));
        let product_0 = u64::from(a) * u64::from(TIMES[0]);
        let product_1 = u64::from(c) * u64::from(TIMES[1]);
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
mod tests;
