//! Rows handed over in large groups, where they lie or gathered.

use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowHeader, RowList};

/// Takes rows in groups, each as large as the sink has room for.
pub trait GroupSink {
    /// Floats of a row's vector part.
    fn vector_floats(&self) -> usize;
    /// About so many rows are to come, as far as is known (`usize::MAX` where it is not): groups may be smaller for it.
    fn expect(&mut self, rows: usize) {
        let _ = rows;
    }
    /// Wait until there is room for a group; the most rows that it may have, at least one.
    fn room(&mut self) -> Result<usize>;
    /// Take a group of at most as many rows as there is room for; they are as they are during the call only. Whoever hands over rows where
    /// they lie holds their table's lock meanwhile, so this does work and waits for nothing.
    fn take(&mut self, rows: RowList<'_>) -> Result<()>;
}

/// Makes groups of rows that come in small parts, by copying them.
pub struct Gather<'a> {
    sink: &'a mut dyn GroupSink,
    floats: usize,
    /// Rows of a full group, once there is a row.
    most: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl std::fmt::Debug for Gather<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gather").field("rows", &self.headers.len()).finish_non_exhaustive()
    }
}

impl<'a> Gather<'a> {
    /// Groups for `sink`.
    pub fn new(sink: &'a mut dyn GroupSink) -> Self {
        let floats = sink.vector_floats();
        Self { sink, floats, most: 0, headers: Vec::new(), vectors: Vec::new() }
    }

    /// Add rows: headers `[n]` and vector parts `[n, V]`. Where the system has no memory for a full group, smaller ones are made.
    pub fn add(&mut self, mut headers: &[RowHeader], mut vectors: &[f32]) -> Result<()> {
        if vectors.len() != headers.len() * self.floats {
            return Err(Error::new(
                Kind::Input,
                format!("{} rows come with {} floats instead of {} each", headers.len(), vectors.len(), self.floats),
            ));
        }
        while !headers.is_empty() {
            if self.headers.is_empty() {
                self.most = self.sink.room()?;
                if self.headers.capacity() == 0 {
                    // At once: growing would hold a group twice, and what is not filled is not resident.
                    self.headers = memory::room_for(self.most);
                    self.vectors = memory::room_for(self.most * self.floats);
                }
            }
            let fits = headers.len().min(self.most - self.headers.len());
            if let Err(refused) = self.reserve(fits) {
                // A smaller group, then.
                if self.headers.is_empty() {
                    return Err(refused);
                }
                self.finish()?;
                continue;
            }
            let (head, rest) = headers.split_at(fits);
            let (values, rest_values) = vectors.split_at(fits * self.floats);
            self.headers.extend_from_slice(head);
            self.vectors.extend_from_slice(values);
            (headers, vectors) = (rest, rest_values);
            if self.headers.len() == self.most {
                self.finish()?;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, rows: usize) -> Result<()> {
        memory::reserve(&mut self.headers, "gather rows for a file", rows)?;
        memory::reserve(&mut self.vectors, "gather rows for a file", rows * self.floats)
    }

    /// Hand over the group begun, if any.
    pub fn finish(&mut self) -> Result<()> {
        if self.headers.is_empty() {
            return Ok(());
        }
        self.sink.take(RowList::block(&self.headers, &self.vectors, self.floats))?;
        self.headers.clear();
        self.vectors.clear();
        Ok(())
    }
}
