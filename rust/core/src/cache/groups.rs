//! Transfer of rows in large groups: passed in place, or gathered from smaller parts.

use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowHeader, RowList};

/// Accepts rows in groups. Each group has at most as many rows as the sink has space for.
pub trait GroupSink {
    /// Number of floats in a row's vector part.
    fn vector_floats(&self) -> usize;
    /// Announces the approximate number of rows, `usize::MAX` if unknown. A sink may prefer smaller groups for few
    /// rows.
    fn expect_rows(&mut self, rows: usize) {
        let _ = rows;
    }
    /// Waits until there is space for a group. Returns its maximum number of rows, at least 1.
    fn wait_for_space(&mut self) -> Result<usize>;
    /// Accepts a group. It has at most as many rows as there is space for. The rows are readable only during the call.
    /// The caller may hold the lock of the rows' table, so this must not block.
    fn take(&mut self, rows: RowList<'_>) -> Result<()>;
}

/// Copies rows that arrive in small parts into groups.
pub struct GroupGatherer<'a> {
    sink: &'a mut dyn GroupSink,
    floats: usize,
    /// Number of rows of a full group. Requested from the sink when a group starts.
    group_rows: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl std::fmt::Debug for GroupGatherer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupGatherer").field("rows", &self.headers.len()).finish_non_exhaustive()
    }
}

impl<'a> GroupGatherer<'a> {
    /// Passes groups to `sink`.
    pub fn new(sink: &'a mut dyn GroupSink) -> Self {
        let floats = sink.vector_floats();
        Self { sink, floats, group_rows: 0, headers: Vec::new(), vectors: Vec::new() }
    }

    /// Adds rows: headers `[n]` and vector parts `[n, V]`. Groups are smaller if memory for full ones cannot be
    /// allocated.
    ///
    /// Errors: `Input` if the vector parts have another length; `Memory`; those of the sink.
    pub fn add(&mut self, mut headers: &[RowHeader], mut vectors: &[f32]) -> Result<()> {
        if vectors.len() != headers.len() * self.floats {
            return Err(Error::new(
                Kind::Input,
                format!("{} rows come with {} floats instead of {} each", headers.len(), vectors.len(), self.floats),
            ));
        }
        while !headers.is_empty() {
            if self.headers.is_empty() {
                self.group_rows = self.sink.wait_for_space()?;
                if self.headers.capacity() == 0 {
                    // Allocates the full size, because growing would keep the group in memory twice. Memory that is not
                    // filled yet is not resident.
                    self.headers = memory::vec_with_capacity(self.group_rows);
                    self.vectors = memory::vec_with_capacity(self.group_rows * self.floats);
                }
            }
            let fits = headers.len().min(self.group_rows - self.headers.len());
            if let Err(refused) = self.reserve(fits) {
                // Passes a smaller group to the sink, which releases its memory.
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
            if self.headers.len() == self.group_rows {
                self.finish()?;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, rows: usize) -> Result<()> {
        memory::reserve(&mut self.headers, "gather rows for a file", rows)?;
        memory::reserve(&mut self.vectors, "gather rows for a file", rows * self.floats)
    }

    /// Passes the last, unfinished group to the sink, if there is one.
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
