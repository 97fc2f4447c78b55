//! Requests to a served checkpoint.

use std::sync::Arc;
use std::time::Instant;

use embcache::serve::{ServeOptions, TableServer};
use embcache::types::Id;

use crate::plain_kernels::DIM;
use crate::served_rows::{Publisher, SERVED_TABLE, served_row};

/// The number of ids of a request.
pub const REQUEST_IDS: usize = 2000;

/// Serves requests of one thread, always into the same memory.
pub struct Requests {
    serving: Arc<TableServer>,
    /// The rows of the last request: `[REQUEST_IDS, DIM]`.
    pub out: Vec<f32>,
    /// True for the ids of the last request that have a row: `[REQUEST_IDS]`.
    pub found: Vec<bool>,
}

impl Requests {
    /// Serves the latest checkpoint.
    ///
    /// # Panics
    /// Panics when it cannot be opened.
    pub fn open(publisher: &Publisher) -> Self {
        Self::with(publisher, ServeOptions::default())
    }

    /// Serves the latest checkpoint, with all of its rows read into memory first.
    ///
    /// # Panics
    /// Panics when it cannot be opened.
    pub fn preloaded(publisher: &Publisher) -> Self {
        Self::with(publisher, ServeOptions { preload: true, ..ServeOptions::default() })
    }

    fn with(publisher: &Publisher, options: ServeOptions) -> Self {
        let serving = TableServer::open(publisher.to_serve(), options).expect("a checkpoint that was published");
        Self { serving, out: vec![0.0; REQUEST_IDS * DIM], found: vec![false; REQUEST_IDS] }
    }

    /// The server.
    pub fn serving(&self) -> &Arc<TableServer> {
        &self.serving
    }

    /// Serves a request of at most [`REQUEST_IDS`] ids, all of which have a row. Returns its duration in seconds.
    ///
    /// # Panics
    /// Panics when a row is missing, and when the disk fails.
    pub fn answer(&mut self, ids: &[Id]) -> f64 {
        let begin = Instant::now();
        let version = self.serving.pin().expect("a version that is not stale");
        let table = version.table(SERVED_TABLE).expect("the table");
        let missing = table.lookup(ids, &mut self.out[..ids.len() * DIM], &mut self.found[..ids.len()]).expect("rows");
        let seconds = begin.elapsed().as_secs_f64();
        assert_eq!(missing, 0, "ids of the table");
        seconds
    }

    /// Serves a request, and checks that its rows are those of version 0.
    ///
    /// # Panics
    /// Panics if a row differs, and like [`Requests::answer`].
    pub fn check(&mut self, ids: &[Id]) {
        self.answer(ids);
        let right = |(id, row): (&Id, &[f32; DIM])| row[..] == served_row(*id, 0)[..];
        assert!(self.found[..ids.len()].iter().all(|found| *found), "ids of the table");
        assert!(ids.iter().zip(self.out.as_chunks::<DIM>().0).all(right), "the rows of these ids");
    }
}
