//! Helpers shared by the tests: a table with everything that its caller provides, a standalone SSD tier, checkpoints,
//! and checks of served rows.

pub mod checkpoint;
pub mod dice;
pub mod linked;
pub mod ranks;
pub mod recis;
pub mod serve;
pub mod ssd;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use embcache::cache::{DeviceRowReader, DeviceTensors, Lookup, MissingMode, Plan, PlanMode, RowBlock, Table};
use embcache::checkpoint::CheckpointDirectory;
use embcache::config::{
    AdmissionRule, MissingRead, OnFull, OptimizerKind, PolicyKind, ReopenMode, SsdConfig, TableConfig,
};
use embcache::io::{FaultEngine, IoEngine, MemoryEngine};
use embcache::kernels::Hyperparameters;
use embcache::rows::{InitializerSpec, RowHeader, RowLayout};
use embcache::types::{CacheSlot, DEFAULT_SCORE_HALF_LIFE_STEPS, Id};

pub use watch::watched;

/// Factor by which random tests run longer than by default: `EMBCACHE_STRESS`, or 1.
///
/// # Panics
///
/// Panics if the variable is not a number.
pub fn times() -> u64 {
    std::env::var("EMBCACHE_STRESS").map_or(1, |text| text.parse().expect("EMBCACHE_STRESS is a number"))
}

/// The directory `path` of an engine, for checkpoints.
pub fn directory_in(engine: &Arc<dyn IoEngine>, path: impl AsRef<Path>) -> CheckpointDirectory {
    CheckpointDirectory::with_engine(Arc::clone(engine), path.as_ref())
}

/// The tensors of a device tier, in RAM. In production torch owns them.
pub struct DeviceMemory {
    layout: RowLayout,
    parts: Mutex<Parts>,
    /// An action, and the number of reads of rows before it runs.
    amid: Mutex<Option<(u32, Amid)>>,
    /// If true, all reads of rows fail.
    is_busy: AtomicBool,
}

/// An action that runs while the native code reads rows of the device. The read returns its error.
type Amid = Box<dyn FnOnce() -> embcache::Result<()> + Send>;

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceMemory").field("layout", &self.layout).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Parts {
    weights: Vec<f32>,
    vector_slots: Vec<Vec<f32>>,
    scalars: Vec<f32>,
}

impl DeviceMemory {
    fn with<T>(&self, body: impl FnOnce(&mut Parts) -> T) -> T {
        body(&mut self.parts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn resize(&self, slots: usize) {
        let RowLayout { dim, vector_slots, .. } = self.layout;
        self.with(|parts| {
            parts.weights.resize(slots * dim, f32::NAN);
            parts.vector_slots.resize_with(vector_slots, Vec::new);
            for slot in &mut parts.vector_slots {
                slot.resize(slots * dim, f32::NAN);
            }
            parts.scalars.resize(slots, f32::NAN);
        });
    }

    fn scatter(&self, slots: &[CacheSlot], vectors: &[f32], scalars: &[f32]) {
        let dim = self.layout.dim;
        let floats = self.layout.vector_floats();
        self.with(|parts| {
            for (position, &slot) in slots.iter().enumerate() {
                let vector = &vectors[position * floats..][..floats];
                let at = slot as usize * dim;
                parts.weights[at..at + dim].copy_from_slice(&vector[..dim]);
                for (which, part) in parts.vector_slots.iter_mut().enumerate() {
                    part[at..at + dim].copy_from_slice(&vector[dim * (which + 1)..][..dim]);
                }
                parts.scalars[slot as usize] = scalars[position];
            }
        });
    }
}

impl DeviceRowReader for DeviceMemory {
    fn gather(&self, slots: &[CacheSlot], vectors: &mut [f32], scalars: &mut [f32]) -> embcache::Result<()> {
        let now = {
            let mut amid = self.amid.lock().unwrap_or_else(PoisonError::into_inner);
            match amid.take() {
                Some((0, now)) => Some(now),
                later => {
                    *amid = later.map(|(reads, later)| (reads - 1, later));
                    None
                }
            }
        };
        now.map_or(Ok(()), |now| now())?;
        if self.is_busy.load(Ordering::Relaxed) {
            return Err(embcache::Kind::Storage.error("the device is busy"));
        }
        let dim = self.layout.dim;
        let floats = self.layout.vector_floats();
        self.with(|parts| {
            for (position, &slot) in slots.iter().enumerate() {
                let vector = &mut vectors[position * floats..][..floats];
                let at = slot as usize * dim;
                vector[..dim].copy_from_slice(&parts.weights[at..at + dim]);
                for (which, part) in parts.vector_slots.iter().enumerate() {
                    vector[dim * (which + 1)..][..dim].copy_from_slice(&part[at..at + dim]);
                }
                scalars[position] = if self.layout.scalar_slot { parts.scalars[slot as usize] } else { 0.0 };
            }
        });
        Ok(())
    }
}

/// A table with its device tensors (if it has a device tier), and a lookup of one feature over it.
#[derive(Debug)]
pub struct Rig {
    /// The table.
    pub table: Table,
    /// A lookup of one feature.
    pub lookup: Lookup,
    device: Option<Arc<DeviceMemory>>,
    /// The number of threads for the kernels.
    pub threads: usize,
    dim: usize,
}

/// The configuration of a table of width `dim` under `optimizer`, with a host budget for about `host_rows` rows and no
/// other tiers.
pub fn config(dim: usize, optimizer: OptimizerKind, host_rows: u64) -> TableConfig {
    let policy = PolicyKind::Lru;
    TableConfig {
        name: "t".into(),
        key: embcache::types::table_key("t"),
        dim,
        optimizer,
        initializer: InitializerSpec::Uniform { low: -1.0, high: 1.0 },
        seed: 7,
        total_num_buckets: 13,
        buckets: 0..13,
        host_bytes: host_rows * embcache::cache::host_row_bytes(&optimizer.layout(dim), policy),
        shared_budget: None,
        device_rows: None,
        ssd: None,
        policy,
        on_full: OnFull::Error,
        admission: AdmissionRule::All,
        not_admitted: MissingRead::Initial,
        missing_read: MissingRead::Initial,
        score_half_life_steps: DEFAULT_SCORE_HALF_LIFE_STEPS,
        eviction: None,
    }
}

/// Like [`config`] under Adagrad, with a device tier of `device_rows` rows if that is set, and an SSD tier of
/// `ssd_bytes` bytes.
pub fn three_tiers(dim: usize, device_rows: Option<u32>, host_rows: u64, ssd_bytes: u64) -> TableConfig {
    let mut wanted = config(dim, OptimizerKind::Adagrad, host_rows);
    wanted.device_rows = device_rows;
    let dir = PathBuf::from("/base/m/t/0-of-1");
    wanted.ssd = Some(SsdConfig { dir, bytes: ssd_bytes, reopen: ReopenMode::Never, resume_commit_id: None });
    wanted
}

/// Hyperparameters with which every optimizer changes every weight.
pub fn hyperparameters() -> Hyperparameters {
    Hyperparameters { lr: 0.1, eps: 1e-6, beta1: 0.9, beta2: 0.99, weight_decay: 0.01, beta: 0.5, l1: 0.0, l2: 0.01 }
}

/// True if an error describes corruption completely: its location, the expected and the actual contents.
pub fn tells_of_damage(error: &embcache::Error) -> bool {
    let message = error.to_string();
    let place = error.path().is_some_and(|path| message.contains(&path.display().to_string()));
    place && ["is damaged at byte ", " should be ", " and is "].iter().all(|part| message.contains(part))
}

/// Interval of the bytes of a file that tests flip: `usual`, or 1 with `EMBCACHE_EVERY_BYTE`.
pub fn flips(usual: usize) -> usize {
    if std::env::var_os("EMBCACHE_EVERY_BYTE").is_some() { 1 } else { usual }
}

/// Every row of a table by id: its header, and the bits of its vector part.
pub type Contents = BTreeMap<Id, (RowHeader, Vec<u32>)>;

impl Rig {
    /// Returns every row of every tier.
    ///
    /// # Panics
    /// Panics if a row occurs twice.
    pub fn contents(&self) -> embcache::Result<Contents> {
        let floats = self.table.config().layout().vector_floats();
        let mut rows = Contents::new();
        self.table.for_each_chunk(100, &mut |chunk| {
            for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(floats)) {
                let bits = vector.iter().map(|value| value.to_bits()).collect();
                assert!(rows.insert(header.id, (*header, bits)).is_none(), "row {} is there twice", header.id);
            }
            Ok(())
        })?;
        Ok(rows)
    }

    /// Imports rows into the table.
    pub fn import(&self, rows: &Contents) -> embcache::Result<()> {
        let headers: Vec<RowHeader> = rows.values().map(|(header, _)| *header).collect();
        let vectors: Vec<f32> =
            rows.values().flat_map(|(_, bits)| bits.iter().map(|&bits| f32::from_bits(bits))).collect();
        self.table.import_rows(RowBlock { headers: &headers, vectors: &vectors })
    }

    /// Opens a table on an engine.
    pub fn open(config: TableConfig, engine: Arc<dyn IoEngine>) -> embcache::Result<Self> {
        let (dim, layout) = (config.dim, config.layout());
        let device = config.device_rows.map(|slots| {
            let memory = Arc::new(DeviceMemory {
                layout,
                parts: Mutex::default(),
                amid: Mutex::default(),
                is_busy: AtomicBool::default(),
            });
            memory.resize(slots as usize);
            memory
        });
        let reader = device.clone().map(|memory| memory as Arc<dyn DeviceRowReader>);
        let table = Table::open(config, reader, engine)?;
        let lookup = Lookup::new(std::slice::from_ref(&table), &[0])?;
        Ok(Self { table, lookup, device, threads: 1, dim })
    }

    /// Opens a table on a disk in RAM with fault injection.
    ///
    /// # Panics
    /// Panics if the table cannot be opened.
    pub fn with_faults(config: TableConfig) -> (Self, FaultEngine) {
        let faults = FaultEngine::new(Arc::new(MemoryEngine::default()));
        (Self::open(config, Arc::new(faults.clone())).expect("a table"), faults)
    }

    /// Plans a batch of one feature.
    pub fn plan(&self, ids: &[Id], mode: PlanMode) -> embcache::Result<Plan> {
        self.lookup.plan(ids, &[0, ids.len() as i64], mode, &[])
    }

    /// Waits for a plan, and scatters the rows that it fetched.
    pub fn place(&self, plan: &Plan) -> embcache::Result<()> {
        plan.wait(&mut [])?;
        self.scatter(plan, 0)?;
        if self.device.is_some() { plan.scattered() } else { Ok(()) }
    }

    /// Scatters the rows that a plan fetched for this rig's table, which is table number `table` of the plan.
    pub fn scatter(&self, plan: &Plan, table: usize) -> embcache::Result<()> {
        if let Some(device) = &self.device {
            device.resize(plan.required_slots(table)? as usize);
            let rows = plan.fetched(table, &mut [])?;
            device.scatter(&rows.slots, &rows.vectors.unwrap_or_default(), &rows.scalars);
        }
        Ok(())
    }

    /// Like [`Rig::place`], with this buffer `[n, V]` for the rows that go to the device. Returns the number of rows in
    /// it, or `None` if they were elsewhere.
    ///
    /// # Panics
    /// Panics if there is no device tier.
    pub fn place_from(&self, plan: &Plan, lent: &mut [f32]) -> embcache::Result<Option<usize>> {
        let device = self.device.as_ref().expect("a device tier");
        plan.wait(&mut [Some(&mut *lent)])?;
        device.resize(plan.required_slots(0)? as usize);
        let rows = plan.fetched(0, lent)?;
        let floats = self.table.config().layout().vector_floats();
        let vectors = match &rows.vectors {
            Some(vectors) => vectors,
            None => &lent[..rows.slots.len() * floats],
        };
        device.scatter(&rows.slots, vectors, &rows.scalars);
        plan.scattered()?;
        Ok(rows.vectors.is_none().then_some(rows.slots.len()))
    }

    /// Runs `amid` while rows are read from the device, after `reads` more reads. Its error ends that read.
    ///
    /// # Panics
    /// Panics if there is no device tier.
    pub fn amid_device_read(&self, reads: u32, amid: impl FnOnce() -> embcache::Result<()> + Send + 'static) {
        let device = self.device.as_ref().expect("a device tier");
        *device.amid.lock().unwrap_or_else(PoisonError::into_inner) = Some((reads, Box::new(amid)));
    }

    /// Makes all reads of rows from the device fail, or succeed again.
    ///
    /// # Panics
    ///
    /// Panics if there is no device tier.
    pub fn set_device_busy(&self, is_busy: bool) {
        self.device.as_ref().expect("a device tier").is_busy.store(is_busy, Ordering::Relaxed);
    }

    /// Returns true if the action of `amid_device_read` ran, or none was set. This removes the action.
    pub fn device_read_ended(&self) -> bool {
        let amid = self.device.as_ref().map(|device| &device.amid);
        amid.is_none_or(|amid| amid.lock().unwrap_or_else(PoisonError::into_inner).take().is_none())
    }

    /// Calls `body` with the device tensors: a slice of one entry, which is `None` without a device tier.
    pub fn with_tensors<T>(&self, body: impl FnOnce(&mut [Option<DeviceTensors<'_>>]) -> T) -> T {
        match &self.device {
            None => body(&mut []),
            Some(device) => device.with(|parts| {
                let scalar_slot = device.layout.scalar_slot;
                body(&mut [Some(DeviceTensors {
                    weights: &mut parts.weights,
                    vector_slots: parts.vector_slots.iter_mut().map(Vec::as_mut_slice).collect(),
                    scalars: scalar_slot.then_some(parts.scalars.as_mut_slice()),
                })])
            }),
        }
    }

    /// The sum of each bag: `[B, D]`. Every bag has `bag` ids, and the last one has the rest.
    pub fn forward(&self, plan: &Plan, ids: usize, bag: usize) -> embcache::Result<Vec<f32>> {
        let offsets: Vec<i64> = (0..ids).step_by(bag).chain([ids]).map(|offset| offset as i64).collect();
        let mut out = vec![0.0; (offsets.len() - 1) * self.dim];
        self.with_tensors(|tensors| plan.forward_pooled(&offsets, None, &[false], &mut out, tensors, self.threads))?;
        Ok(out)
    }

    /// The backward of `forward`, with a gradient that differs by position and by `salt`.
    pub fn backward(&self, plan: &Plan, out: usize, salt: u32) -> embcache::Result<()> {
        let grad: Vec<f32> =
            (0..out as u32).map(|place| ((place * 37 + salt * 11) % 101) as f32 / 50.0 - 1.0).collect();
        self.backward_with(plan, &grad)
    }

    /// The backward of `forward`, with this gradient of its output.
    pub fn backward_with(&self, plan: &Plan, grad: &[f32]) -> embcache::Result<()> {
        self.with_tensors(|tensors| plan.backward_pooled(grad, &[hyperparameters()], None, tensors, self.threads))
    }

    /// Runs a training step, and returns the forward's output.
    pub fn train(&self, ids: &[Id], bag: usize, salt: u32) -> embcache::Result<Vec<f32>> {
        let plan = self.plan(ids, PlanMode::TRAIN)?;
        self.finish(&plan, ids.len(), bag, salt)
    }

    /// Waits for an earlier plan, and runs its forward and its backward.
    pub fn finish(&self, plan: &Plan, ids: usize, bag: usize, salt: u32) -> embcache::Result<Vec<f32>> {
        self.place(plan)?;
        let out = self.forward(plan, ids, bag)?;
        self.backward(plan, out.len(), salt)?;
        Ok(out)
    }

    /// Evaluates a batch, and returns the forward's output.
    pub fn evaluate(&self, ids: &[Id], bag: usize, reads_zeros: bool) -> embcache::Result<Vec<f32>> {
        let plan = self.plan(
            ids,
            PlanMode {
                missing: if reads_zeros { MissingMode::Zeros } else { MissingMode::Initial },
                ..PlanMode::EVALUATE
            },
        )?;
        self.place(&plan)?;
        self.forward(&plan, ids.len(), bag)
    }
}
