//! The threads of the kernels: one pool for all calls, and work that is divided into parts of equal cost.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::runtime::memory::can_start_threads;
use crate::runtime::process::{PerProcess, works_alone, works_in_background};
use crate::runtime::sync::{self, Condvar, lock, wait};

/// The number of parts per thread. With many small parts, a thread that starts late takes few of them.
const PARTS_PER_THREAD: usize = 16;
/// With less work than this (in floats accessed) an additional thread costs more time than it saves. Tests run small
/// work on all requested threads.
const MINIMUM_COST_PER_THREAD: u64 = if cfg!(test) { 1 } else { 16_384 };

/// Calls `work(from..to)` for ranges that cover `0..items`, on `threads` threads including the caller. `cost_before(i)`
/// is the cost of the items before `i`; it is non-decreasing. The assignment of ranges to threads is arbitrary, so
/// results must not depend on it.
pub(crate) fn parallel_ranges(
    threads: usize,
    items: usize,
    cost_before: impl Fn(usize) -> u64,
    work: impl Fn(std::ops::Range<usize>) + Sync,
) {
    let (total, most) = (cost_before(items), threads);
    let threads = most.min((total / MINIMUM_COST_PER_THREAD) as usize).min(items);
    let Some(workers) = (if threads > 1 { workers(threads - 1, most - 1) } else { None }) else {
        return work(0..items);
    };
    let parts = threads * PARTS_PER_THREAD;
    let mut bounds: Vec<usize> = (0..=parts)
        .map(|part| first_at_cost(items, (u128::from(total) * part as u128 / parts as u128) as u64, &cost_before))
        .collect();
    // The search above stops before zero-cost items at the end.
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
    workers.run_with_helpers(threads - 1, &take, |ask| {
        (1..threads).for_each(|_| ask());
        take();
    });
}

/// Runs `producer`, which emits pieces of work, on `threads` threads including the caller. The others process pieces
/// while this thread continues with `producer`, and it helps them afterwards. All are complete when this returns.
/// `cost` is the total cost of all pieces, in floats accessed.
pub(crate) fn parallel_pipeline<T: Send, R>(
    threads: usize,
    cost: u64,
    work: impl Fn(T) + Sync,
    producer: impl FnOnce(&mut dyn FnMut(T)) -> R,
) -> R {
    let most = threads;
    let threads = most.min((cost / MINIMUM_COST_PER_THREAD) as usize);
    let Some(workers) = (if threads > 1 { workers(threads - 1, most - 1) } else { None }) else {
        return producer(&mut |piece| work(piece));
    };
    let pieces = Mutex::new(VecDeque::new());
    let take = || {
        loop {
            let next = lock(&pieces).pop_front();
            let Some(piece) = next else { return };
            work(piece);
        }
    };
    workers.run_with_helpers(threads - 1, &take, |ask| {
        let done = producer(&mut |piece| {
            lock(&pieces).push_back(piece);
            ask();
        });
        take();
        done
    })
}

/// An address at which several threads write, each to other elements.
pub(crate) struct DisjointPtr<T>(pub(crate) *mut T);

impl<T> DisjointPtr<T> {
    /// The address of an element.
    #[allow(clippy::inline_always)] // Used within kernels; see `simd`.
    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

// SAFETY: only addresses are shared. Code that writes to them guarantees that no two threads write the same element.
unsafe impl<T> Sync for DisjointPtr<T> {}

/// The first item before which the total cost is at least `cost`.
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

/// The workers of this process: one pool, which serves every call. A forked child forgets its parent's pool without
/// dropping it, because that would wait for threads that do not exist in the child.
static WORKERS: PerProcess<Mutex<Option<Arc<WorkerSet>>>> = PerProcess::new();

/// Returns the workers, `wanted` or more of them unless the OS starts fewer threads; `None` if it starts none. The
/// caller never requests more than `most`.
///
/// A pool that is too small is replaced by one of twice the size, or of `most`. Its threads stop with the last call
/// that they serve, so there are about as many threads as the largest request of a call.
fn workers(wanted: usize, most: usize) -> Option<Arc<WorkerSet>> {
    let mut kept = lock(WORKERS.get(|| Ok(Mutex::default())).ok()?);
    if kept.as_ref().is_none_or(|pool| pool.size() < wanted)
        && can_start_threads()
        && let Some(larger) = build_workers(wanted.next_power_of_two().min(most))
    {
        *kept = Some(larger);
    }
    kept.clone()
}

/// Starts a pool of `size` threads. Returns `None` if the OS cannot start threads.
fn build_workers(size: usize) -> Option<Arc<WorkerSet>> {
    let (begun, all_begun) = mpsc::channel();
    let builder = ThreadPoolBuilder::new()
        .num_threads(size)
        .thread_name(move |which| format!("embcache-kernel-{which}"))
        .start_handler(move |_| {
            let _ = begun.send(());
        });
    let pool = builder.build().ok()?;
    // Wait until all threads have started. A thread needs memory to start, and aborts the process if that fails.
    for () in all_begun.iter().take(size) {}
    Some(Arc::new(WorkerSet::new(pool)))
}

/// The number of threads that the machine runs in parallel. It is cached, because the OS reads files to find it.
fn machine_threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Runs independent tasks on all of the machine's threads, including the caller. Tasks start in order.
pub(crate) fn for_each<T: Send>(tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    for_each_on(machine_threads(), tasks, work);
}

/// Runs independent tasks on half of the machine's threads, including the caller. It is used to gather rows for the
/// disk: this many threads are faster than the disk, and more would mostly wait for the same memory. Tasks start in
/// order, so that data that the caller has just accessed is still cached.
pub(crate) fn for_each_on_half<T: Send>(tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    for_each_on(machine_threads() / 2, tasks, work);
}

/// Runs independent tasks, which may wait for locks and for foreign code, on `threads` threads including the caller.
/// Tasks start in order.
///
/// All workers may be blocked in such tasks, waiting for a lock that another call's caller holds. That caller then has
/// no helpers, and does not wait for workers that have not started, so it eventually releases its lock.
pub(crate) fn for_each_that_waits<T: Send>(threads: usize, tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    for_each_on(if works_alone() { 1 } else { threads }, tasks, work);
}

fn for_each_on<T: Send>(threads: usize, tasks: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    let tasks: Vec<T> = tasks.collect();
    run_tasks(if tasks.len() > 1 { threads } else { 1 }, tasks, work, || ());
}

/// Runs independent tasks on the machine's threads while this thread runs `caller_work`, after which it helps them.
pub(crate) fn for_each_alongside<T: Send, R>(
    tasks: impl Iterator<Item = T>,
    work: impl Fn(T) + Sync,
    caller_work: impl FnOnce() -> R,
) -> R {
    run_tasks(machine_threads(), tasks.collect(), work, caller_work)
}

/// Runs independent tasks on `threads` threads including the caller, which runs `caller_work` first. Tasks start in
/// order.
fn run_tasks<T: Send, R>(threads: usize, tasks: Vec<T>, work: impl Fn(T) + Sync, caller_work: impl FnOnce() -> R) -> R {
    let helpers = tasks.len().min(threads.saturating_sub(1));
    let Some(workers) = (if helpers > 0 && !works_in_background() { workers(helpers, threads - 1) } else { None })
    else {
        let done = caller_work();
        tasks.into_iter().for_each(work);
        return done;
    };
    let take = task_loop(tasks, work);
    workers.run_with_helpers(helpers, &take, |ask| {
        (0..helpers).for_each(|_| ask());
        let done = caller_work();
        take();
        done
    })
}

/// The loop of each thread that takes part in these tasks: it runs one after the other, until none remains.
fn task_loop<T: Send>(tasks: Vec<T>, work: impl Fn(T) + Sync) -> impl Fn() + Sync {
    let tasks = Mutex::new(tasks.into_iter());
    move || {
        loop {
            let next = lock(&tasks).next();
            let Some(task) = next else { return };
            work(task);
        }
    }
}

/// A pool of threads that help with calls, one call or several at a time. A call does not wait for threads that have
/// not started.
///
/// A pool thread may be busy, or may take long to wake up. So the threads that a call requests enter through a
/// [`CallLatch`]. When the caller has finished its own part, all work is taken: it closes the latch, and waits only for
/// the threads inside. A thread that arrives later finds the latch closed and does nothing, as does one that arrives
/// when the call has its maximum number of helpers.
struct WorkerSet {
    threads: ThreadPool,
}

impl WorkerSet {
    fn new(threads: ThreadPool) -> Self {
        Self { threads }
    }

    /// Number of threads.
    fn size(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// Runs `caller_work`, which receives a function that requests a pool thread to run `work` once. At most `most`
    /// threads run it at a time. No thread runs it when this returns.
    ///
    /// # Panics
    /// Panics with the panic of `caller_work`, or of a helper thread.
    fn run_with_helpers<R>(
        &self,
        most: usize,
        work: &(dyn Fn() + Sync),
        caller_work: impl FnOnce(&dyn Fn()) -> R,
    ) -> R {
        let way_in = HelperTask { latch: Arc::new(CallLatch::for_threads(most)), work: HelperWork::of(work) };
        let open = OpenLatch(&way_in.latch);
        let done = caller_work(&|| {
            let way_in = way_in.clone();
            self.threads.spawn(move || way_in.run());
        });
        // The borrow of `work` ends here. No thread uses it afterwards.
        drop(open);
        if let Some(panic) = way_in.latch.panic() {
            resume_unwind(panic);
        }
        done
    }
}

/// A request to help with one call.
#[derive(Clone)]
struct HelperTask {
    latch: Arc<CallLatch>,
    work: HelperWork,
}

impl HelperTask {
    /// Runs the work, unless its latch is closed or the call has all its helpers.
    fn run(&self) {
        // SAFETY: the call borrows the work until its latch is closed and no thread is inside. This runs inside.
        self.latch.enter(|| unsafe { self.work.run() });
    }
}

/// Closes the latch when it is dropped, also by a panic.
struct OpenLatch<'a>(&'a CallLatch);

impl Drop for OpenLatch<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The work of a helper thread.
#[derive(Clone, Copy)]
struct HelperWork(*const (dyn Fn() + Sync));

impl HelperWork {
    fn of(work: &(dyn Fn() + Sync)) -> Self {
        let work: *const (dyn Fn() + Sync + '_) = work;
        #[allow(clippy::transmute_ptr_to_ptr)] // A cast may not change the lifetime.
        // SAFETY: the types differ only in a lifetime, about which a pointer guarantees nothing. `run` states its
        // requirements.
        Self(unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work) })
    }

    /// # Safety
    /// The reference passed to `of` is still borrowed.
    unsafe fn run(self) {
        // SAFETY: the caller guarantees that the reference behind the pointer is valid.
        unsafe { (*self.0)() }
    }
}

// SAFETY: the referent is `Sync`, so any thread may call it. The caller of `run` guarantees that it is valid.
unsafe impl Send for HelperWork {}
// SAFETY: as for `Send`.
unsafe impl Sync for HelperWork {}

/// The latch of the work of one call.
struct CallLatch {
    /// The number of threads that may be inside at a time.
    most: usize,
    state: sync::Mutex<LatchState>,
    empty: Condvar,
}

#[derive(Default)]
struct LatchState {
    is_closed: bool,
    threads: usize,
    /// The first panic of a thread inside.
    panic: Option<Box<dyn Any + Send>>,
}

impl CallLatch {
    fn for_threads(most: usize) -> Self {
        Self { most, state: sync::Mutex::default(), empty: Condvar::default() }
    }

    /// Runs `work` inside, unless the latch is closed or `most` threads are inside.
    fn enter(&self, work: impl FnOnce()) {
        {
            let mut inside = lock(&self.state);
            if inside.is_closed || inside.threads >= self.most {
                return;
            }
            inside.threads += 1;
        }
        let done = catch_unwind(AssertUnwindSafe(work));
        let mut inside = lock(&self.state);
        inside.threads -= 1;
        if let Err(panic) = done {
            inside.panic.get_or_insert(panic);
        }
        if inside.threads == 0 {
            self.empty.notify_all();
        }
    }

    /// Closes the latch, and waits until no thread is inside.
    fn close(&self) {
        let mut inside = lock(&self.state);
        inside.is_closed = true;
        while inside.threads > 0 {
            inside = wait(&self.empty, inside);
        }
    }

    /// Returns the panic of a thread that was inside.
    fn panic(&self) -> Option<Box<dyn Any + Send>> {
        lock(&self.state).panic.take()
    }
}

#[cfg(test)]
mod tests;
