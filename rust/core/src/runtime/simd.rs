//! One source for several instruction sets, with bitwise identical results on each, and prefetches of cache lines.
//!
//! A [`SimdJob`] is compiled once for each instruction set, and runs on the best one of the CPU. Its arithmetic is IEEE
//! addition, multiplication, division and square root on 16 virtual lanes, in an order that the source fixes. Rust
//! never contracts a multiplication and an addition into one rounding, so the width of the vectors does not change the
//! results.
#![allow(unsafe_code)]
// Functions that are not inlined into a job are compiled for the baseline. Lanes are plain loops, because closures may
// not be inlined.
#![allow(clippy::inline_always, clippy::needless_range_loop)]

use std::ops::{Add, Div, Mul, Sub};

/// An instruction set for which jobs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// The instruction set of the crate's build.
    Baseline,
    /// AVX2 of x86-64.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL of x86-64.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Work that is compiled for every instruction set. `run`, and everything that it calls in its loops, must be
/// `#[inline(always)]`.
pub(crate) trait SimdJob {
    /// The result of the work.
    type Output;
    /// Runs the work.
    fn run(self) -> Self::Output;
}

impl InstructionSet {
    /// Returns the widest instruction set of this CPU.
    pub(crate) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            // The macro caches its result.
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Self::Avx2;
            }
        }
        Self::Baseline
    }

    /// Returns all instruction sets of this CPU.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        match Self::best() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => vec![Self::Baseline, Self::Avx2, Self::Avx512],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => vec![Self::Baseline, Self::Avx2],
            Self::Baseline => vec![Self::Baseline],
        }
    }

    /// Runs `job` compiled for this instruction set, which the CPU must support. That holds for the values of
    /// [`InstructionSet::best`] and, in tests, [`InstructionSet::all`].
    #[inline]
    pub(crate) fn run<J: SimdJob>(self, job: J) -> J::Output {
        match self {
            Self::Baseline => job.run(),
            // SAFETY: this value is only created after AVX2 was detected.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { run_avx2(job) },
            // SAFETY: this value is only created after the four sets of AVX-512 were detected.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { run_avx512(job) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<J: SimdJob>(job: J) -> J::Output {
    job.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<J: SimdJob>(job: J) -> J::Output {
    job.run()
}

/// The number of virtual lanes of a vector.
pub(crate) const LANES: usize = 16;

/// 16 float32: one register of AVX-512, two of AVX2, four of SSE2 or NEON.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub(crate) struct FloatLanes([f32; LANES]);

impl FloatLanes {
    /// Sets every lane to `value`.
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    /// # Safety
    /// 16 floats can be read at `from`.
    #[inline(always)]
    pub(crate) unsafe fn load_all(from: *const f32) -> Self {
        // SAFETY: the caller guarantees that 16 floats can be read, and an array of floats has no stricter alignment
        // than a float.
        Self(unsafe { from.cast::<[f32; LANES]>().read() })
    }

    /// Loads the first `count` lanes from memory, and sets the others to zero.
    ///
    /// # Safety
    /// `count` floats can be read at `from`, `count <= 16`.
    #[inline(always)]
    pub(crate) unsafe fn load_first(from: *const f32, count: usize) -> Self {
        if count == LANES {
            // SAFETY: the caller guarantees that `count` floats can be read, which is 16 here.
            return unsafe { Self::load_all(from) };
        }
        let mut lanes = [0.0; LANES];
        // SAFETY: the caller guarantees that `count` floats can be read, which is below 16 here, and `lanes` has 16.
        unsafe { copy_below_16(from, lanes.as_mut_ptr(), count) };
        Self(lanes)
    }

    /// # Safety
    /// 16 floats can be written at `to`.
    #[inline(always)]
    pub(crate) unsafe fn store_all(self, to: *mut f32) {
        // SAFETY: the caller guarantees that 16 floats can be written.
        unsafe { to.cast::<[f32; LANES]>().write(self.0) };
    }

    /// # Safety
    /// `count` floats can be written at `to`, `count <= 16`.
    #[inline(always)]
    pub(crate) unsafe fn store_first(self, to: *mut f32, count: usize) {
        if count == LANES {
            // SAFETY: the caller guarantees that `count` floats can be written, which is 16 here.
            return unsafe { self.store_all(to) };
        }
        // SAFETY: the caller guarantees that `count` floats can be written, which is below 16 here, and there are 16
        // lanes to read.
        unsafe { copy_below_16(self.0.as_ptr(), to, count) };
    }

    /// The square root of each lane.
    #[inline(always)]
    pub(crate) fn sqrt(self) -> Self {
        let mut lanes = [0.0; LANES];
        for lane in 0..LANES {
            lanes[lane] = self.0[lane].sqrt();
        }
        Self(lanes)
    }

    /// Each lane moved towards zero by `amount`, and zero if it is within `amount` of zero.
    #[inline(always)]
    pub(crate) fn shrunk(self, amount: f32) -> Self {
        let mut lanes = [0.0; LANES];
        for lane in 0..LANES {
            let value = self.0[lane];
            lanes[lane] = if value.abs() <= amount { 0.0 } else { value - amount.copysign(value) };
        }
        Self(lanes)
    }

    /// Each lane divided by the lane of `divisor`, and zero if the divisor is zero.
    #[inline(always)]
    pub(crate) fn over_or_zero(self, divisor: Self) -> Self {
        let mut lanes = [0.0; LANES];
        for lane in 0..LANES {
            let quotient = self.0[lane] / divisor.0[lane];
            lanes[lane] = if divisor.0[lane] == 0.0 { 0.0 } else { quotient };
        }
        Self(lanes)
    }

    /// The sum of all lanes. The upper half is added to the lower half, repeatedly.
    #[inline(always)]
    pub(crate) fn sum(self) -> f32 {
        let mut eight = [0.0; 8];
        for lane in 0..8 {
            eight[lane] = self.0[lane] + self.0[lane + 8];
        }
        let mut four = [0.0; 4];
        for lane in 0..4 {
            four[lane] = eight[lane] + eight[lane + 4];
        }
        (four[0] + four[2]) + (four[1] + four[3])
    }
}

/// Copies fewer than 16 floats in pieces whose sizes are powers of two. This is short and calls no function.
///
/// # Safety
/// `count < 16` floats can be read at `from` and written at `to`, which do not overlap.
#[inline(always)]
unsafe fn copy_below_16(from: *const f32, to: *mut f32, count: usize) {
    let mut at = 0;
    for power in [8, 4, 2, 1] {
        if count & power != 0 {
            // SAFETY: `at + power` is at most `count`, and the caller guarantees that this many floats can be read and
            // written.
            unsafe { to.add(at).copy_from_nonoverlapping(from.add(at), power) };
            at += power;
        }
    }
}

macro_rules! lanewise {
    ($($trait:ident $method:ident $operator:tt),*) => {$(
        impl $trait for FloatLanes {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                let mut lanes = [0.0; LANES];
                for lane in 0..LANES {
                    lanes[lane] = self.0[lane] $operator other.0[lane];
                }
                Self(lanes)
            }
        }
    )*};
}
lanewise!(Add add +, Sub sub -, Mul mul *, Div div /);

/// Columns of a row that are summed in registers: one vector of lanes, or four. The four are named fields, because the
/// compiler keeps arrays of them on the stack.
pub(crate) trait ColumnLanes: Copy {
    /// The number of float32.
    const FLOATS: usize;
    /// Zeros.
    fn zero() -> Self;
    /// # Safety
    /// `count` floats can be read at `from`. `count` may be below `FLOATS` only if `FLOATS` is 16.
    unsafe fn load(from: *const f32, count: usize) -> Self;
    /// # Safety
    /// `count` floats can be written at `to`. `count` may be below `FLOATS` only if `FLOATS` is 16.
    unsafe fn store(self, to: *mut f32, count: usize);
    /// Prefetches the `FLOATS` floats at `from`, which may be any address.
    #[inline(always)]
    fn prefetch(from: *const f32) {
        for line in 0..Self::FLOATS / LANES {
            prefetch_address(from.wrapping_add(line * LANES));
        }
        if !from.addr().is_multiple_of(64) {
            prefetch_address(from.wrapping_add(Self::FLOATS - 1));
        }
    }
    /// The sum, column by column.
    fn plus(self, other: Self) -> Self;
    /// Each column times `factor`.
    fn times(self, factor: f32) -> Self;
    /// Each column divided by `divisor`.
    fn over(self, divisor: f32) -> Self;
}

impl ColumnLanes for FloatLanes {
    const FLOATS: usize = LANES;
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller guarantees that `count` floats can be read.
        unsafe { Self::load_first(from, count) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, count: usize) {
        // SAFETY: the caller guarantees that `count` floats can be written.
        unsafe { self.store_first(to, count) };
    }
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self + other
    }
    #[inline(always)]
    fn times(self, factor: f32) -> Self {
        self * Self::splat(factor)
    }
    #[inline(always)]
    fn over(self, divisor: f32) -> Self {
        self / Self::splat(divisor)
    }
}

/// 64 columns.
#[derive(Clone, Copy)]
pub(crate) struct WideLanes(FloatLanes, FloatLanes, FloatLanes, FloatLanes);

impl ColumnLanes for WideLanes {
    const FLOATS: usize = 4 * LANES;
    #[inline(always)]
    fn zero() -> Self {
        Self(FloatLanes::zero(), FloatLanes::zero(), FloatLanes::zero(), FloatLanes::zero())
    }
    #[inline(always)]
    unsafe fn load(from: *const f32, _count: usize) -> Self {
        // SAFETY: the caller guarantees that 64 floats can be read.
        unsafe {
            Self(
                FloatLanes::load_all(from),
                FloatLanes::load_all(from.add(LANES)),
                FloatLanes::load_all(from.add(2 * LANES)),
                FloatLanes::load_all(from.add(3 * LANES)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, _count: usize) {
        // SAFETY: the caller guarantees that 64 floats can be written.
        unsafe {
            self.0.store_all(to);
            self.1.store_all(to.add(LANES));
            self.2.store_all(to.add(2 * LANES));
            self.3.store_all(to.add(3 * LANES));
        }
    }
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0, self.1 + other.1, self.2 + other.2, self.3 + other.3)
    }
    #[inline(always)]
    fn times(self, factor: f32) -> Self {
        Self(self.0.times(factor), self.1.times(factor), self.2.times(factor), self.3.times(factor))
    }
    #[inline(always)]
    fn over(self, divisor: f32) -> Self {
        Self(self.0.over(divisor), self.1.over(divisor), self.2.over(divisor), self.3.over(divisor))
    }
}

/// Runs a block for every 16 columns of a row as `|at, count|`, where `count` is below 16 in the last one only. This is
/// a macro, because the block must be inlined in both places.
macro_rules! by_lanes {
    ($dim:expr, |$at:ident, $count:ident| $block:block) => {{
        let mut $at = 0;
        while $at + $crate::runtime::simd::LANES <= $dim {
            let $count = $crate::runtime::simd::LANES;
            $block
            $at += $crate::runtime::simd::LANES;
        }
        if $at < $dim {
            let $count = $dim - $at;
            $block
        }
    }};
}
pub(crate) use by_lanes;

/// Prefetches the cache line of `slice[index]`. The index may be out of range. On CPUs other than x86-64 and aarch64
/// this does nothing.
#[inline]
pub(crate) fn prefetch<T>(slice: &[T], index: usize) {
    prefetch_address(slice.as_ptr().wrapping_add(index));
}

/// Prefetches the cache line at `address`, which need not be valid.
#[inline]
pub(crate) fn prefetch_address<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults and changes no memory, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[cfg(target_arch = "aarch64")]
    {
        // SAFETY: the instruction is a prefetch, which never faults and changes no memory, for any address.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nostack, preserves_flags, readonly))
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Prefetches the cache lines of the `bytes` bytes at `address`. They need not be valid.
#[inline]
pub(crate) fn prefetch_range(address: *const u8, bytes: usize) {
    const LINE: usize = 64;
    let end = address.addr() + bytes;
    let mut line = address.wrapping_sub(address.addr() % LINE);
    while line.addr() < end {
        prefetch_address(line);
        line = line.wrapping_add(LINE);
    }
}
