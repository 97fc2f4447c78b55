//! Threads of the kernels: cached pools, work dealt in parts of even cost.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::process::{PerProcess, works_behind};
use crate::sync::lock;

/// Parts a thread, so that a thread that is late has few of them.
const PARTS_PER_THREAD: usize = 16;
/// Below this cost (floats touched) a thread costs more than it saves. Tests run small work on all the threads they ask for.
const MINIMUM_COST_PER_THREAD: u64 = if cfg!(test) { 1 } else { 16_384 };

/// Run `work(from..to)` over all of `0..items` on `threads` threads (this one among them); `cost_before(i)` is the cost of the
/// items before `i`, increasing. Which thread takes which range is left to chance: results must not depend on it.
pub(crate) fn deal(
    threads: usize,
    items: usize,
    cost_before: impl Fn(usize) -> u64,
    work: impl Fn(std::ops::Range<usize>) + Sync,
) {
    let total = cost_before(items);
    let threads = threads.min((total / MINIMUM_COST_PER_THREAD) as usize).min(items);
    let Some(pool) = (if threads > 1 { pool(threads - 1) } else { None }) else {
        return work(0..items);
    };
    let parts = threads * PARTS_PER_THREAD;
    let mut bounds: Vec<usize> = (0..=parts)
        .map(|part| first_at_cost(items, (u128::from(total) * part as u128 / parts as u128) as u64, &cost_before))
        .collect();
    // Items at the end that cost nothing.
    bounds[parts] = items;
    let next = AtomicUsize::new(0);
    let take = || {
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                return;
            }
            if bounds[part] < bounds[part + 1] {
                work(bounds[part]..bounds[part + 1]);
            }
        }
    };
    pool.in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| take());
        }
        take();
    });
}

/// An address that threads write disjoint parts behind.
pub(crate) struct Shared<T>(pub(crate) *mut T);

impl<T> Shared<T> {
    /// The address of an element.
    #[allow(clippy::inline_always)] // Within kernels; see `simd`.
    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

// SAFETY: each thread writes only what it was dealt, which is nobody else's.
unsafe impl<T> Sync for Shared<T> {}

/// The first item with at least `cost` before it.
fn first_at_cost(items: usize, cost: u64, cost_before: &impl Fn(usize) -> u64) -> usize {
    let (mut low, mut high) = (0, items);
    while low < high {
        let middle = usize::midpoint(low, high);
        if cost_before(middle) < cost {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

/// The pools of this process by size. A parent's stay where they are: dropping them would wait for threads that a child has not.
static POOLS: PerProcess<Mutex<Vec<Arc<ThreadPool>>>> = PerProcess::new();

/// A pool of `size` threads; `None` where the system gives no threads.
fn pool(size: usize) -> Option<Arc<ThreadPool>> {
    let mut pools = lock(POOLS.get(|| Ok(Mutex::default())).ok()?);
    if let Some(pool) = pools.iter().find(|pool| pool.current_num_threads() == size) {
        return Some(Arc::clone(pool));
    }
    let (begun, all_begun) = mpsc::channel();
    let builder = ThreadPoolBuilder::new()
        .num_threads(size)
        .thread_name(|which| format!("embcache-kernel-{which}"))
        .start_handler(move |_| {
            let _ = begun.send(());
        });
    let pool = Arc::new(builder.build().ok()?);
    // A thread that begins when the system has no memory left ends the process: it needs some of its own.
    for () in all_begun.iter().take(size) {}
    pools.push(Arc::clone(&pool));
    Some(pool)
}

/// Threads that the machine runs at once; asked for once, as the answer is in files.
fn machine_threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// So many threads as the machine runs at once; `None` where one is no more than the caller's, or the system gives none. (Rayon's own
/// pool ends in a panic there, and is of no use in a forked child.)
fn machine_pool() -> Option<Arc<ThreadPool>> {
    let threads = machine_threads();
    if threads > 1 { pool(threads) } else { None }
}

/// Do independent tasks on the machine's threads, in any order.
pub(crate) fn for_each<T: Send>(tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    let tasks: Vec<T> = tasks.collect();
    match if tasks.len() > 1 && !works_behind() { machine_pool() } else { None } {
        Some(pool) => pool.install(|| tasks.into_par_iter().for_each(&work)),
        None => tasks.into_iter().for_each(work),
    }
}

/// The same on half of them, this one among them: what gathers rows for the disk is so ahead of it, and more threads would mostly wait
/// for the same memory. Tasks are begun in their order, and work with what the caller has in its caches.
pub(crate) fn for_each_on_half<T: Send>(tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    let tasks: Vec<T> = tasks.collect();
    let helpers = (machine_threads() / 2).min(tasks.len()).saturating_sub(1);
    let Some(pool) = (if helpers > 0 && !works_behind() { pool(helpers) } else { None }) else {
        return tasks.into_iter().for_each(work);
    };
    let tasks = Mutex::new(tasks.into_iter());
    let take = || {
        loop {
            let next = lock(&tasks).next();
            let Some(task) = next else { return };
            work(task);
        }
    };
    pool.in_place_scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(|_| take());
        }
        take();
    });
}

/// Do independent tasks on the machine's threads while this one does something of its own.
pub(crate) fn beside<T: Send, R>(
    tasks: impl Iterator<Item = T>,
    work: impl Fn(T) + Sync,
    own: impl FnOnce() -> R,
) -> R {
    let tasks: Vec<T> = tasks.collect();
    let Some(pool) = machine_pool() else {
        tasks.into_iter().for_each(&work);
        return own();
    };
    pool.in_place_scope(|scope| {
        let work = &work;
        for task in tasks {
            scope.spawn(move |_| work(task));
        }
        own()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_dealt_once_whatever_the_costs() {
        for threads in [1, 2, 3, 8] {
            for items in [0, 1, 2, 7, 1000] {
                for cost in [|_| 1, |item: usize| item as u64, |item: usize| if item == 3 { 1_000_000 } else { 1 }] {
                    let mut before = vec![0];
                    before.extend((0..items).scan(0, |sum, item| {
                        *sum += cost(item);
                        Some(*sum)
                    }));
                    let taken: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                    deal(
                        threads,
                        items,
                        |item| before[item],
                        |range| {
                            for item in range {
                                taken[item].fetch_add(1, Ordering::Relaxed);
                            }
                        },
                    );
                    assert!(
                        taken.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                        "{threads} threads {items} items"
                    );
                }
            }
        }
    }

    #[test]
    fn work_runs_on_as_many_threads_as_asked() {
        let inside = std::sync::Barrier::new(3);
        // Nobody passes before all three are in.
        deal(
            3,
            3,
            |item| item as u64,
            |range| {
                for _ in range {
                    inside.wait();
                }
            },
        );
    }
}
