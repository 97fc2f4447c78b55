//! How many rows a table has, and how many it may have soon.

/// The counts of one table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowCounts {
    /// Rows of the table in all tiers: born and not removed.
    rows: u64,
    /// Rows that are planned and not born yet.
    provisional: u64,
    /// Provisional rows that training plans in flight hold, summed over the plans: a row that two of them hold counts twice. Evaluations
    /// pledge nothing, since their rows are never born.
    pledged: u64,
    /// Rows that were dropped because the table was full.
    dropped: u64,
    /// Rows that died by the table's rule of eviction.
    expired: u64,
}

impl RowCounts {
    /// The counts of a table that is opened with `rows` rows.
    pub(crate) fn of(rows: u64) -> Self {
        Self { rows, ..Self::default() }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn provisional(&self) -> u64 {
        self.provisional
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// How many provisional rows may be born, at most.
    pub(crate) fn max_new_rows(&self) -> u64 {
        self.provisional.min(self.pledged)
    }

    /// Rows became provisional.
    pub(crate) fn became_provisional(&mut self, rows: u64) {
        self.provisional += rows;
    }

    /// Provisional rows vanished without being trained.
    pub(crate) fn vanished(&mut self, rows: u64) {
        self.provisional -= rows;
    }

    /// Provisional rows were trained for the first time.
    pub(crate) fn inserted(&mut self, rows: u64) {
        self.provisional -= rows;
        self.rows += rows;
    }

    /// A training plan holds provisional rows.
    pub(crate) fn pledge(&mut self, rows: u64) {
        self.pledged += rows;
    }

    /// A training plan holds them no more.
    pub(crate) fn take_back_pledge(&mut self, rows: u64) {
        self.pledged -= rows;
    }

    /// Rows were imported that were not there before.
    pub(crate) fn added(&mut self, rows: u64) {
        self.rows += rows;
    }

    /// Rows were removed.
    pub(crate) fn removed(&mut self, rows: u64) {
        self.rows -= rows;
    }

    /// Rows died by the table's rule of eviction.
    pub(crate) fn expired_by_rule(&mut self, rows: u64) {
        self.rows -= rows;
        self.expired += rows;
    }

    /// Rows were dropped because the table was full.
    pub(crate) fn dropped_when_full(&mut self, rows: u64) {
        self.rows -= rows;
        self.dropped += rows;
    }

    /// All rows were forgotten. No plan holds any.
    pub(crate) fn cleared(&mut self) {
        self.rows = 0;
        self.provisional = 0;
    }
}
