//! How far the devices of a tenant's ranks have come: a file of counters that all of them map.
//!
//! A kernel of a collective writes its rank's count and waits until all who take part have come as far. A
//! simulated one does the same with reads and writes of the file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use sublet_tests::Outcome;

/// Most ranks of a tenant.
pub(crate) const RANKS_MAX: u32 = 64;
const CELL_BYTES: u64 = 8;
const ROW_BYTES: usize = 8 * RANKS_MAX as usize;

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct Board {
    file: File,
}

impl Board {
    /// A new board, with all counts 0.
    pub(crate) fn create(path: &Path) -> Outcome<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        // The first cell says whether kernels are to give up; each lane has a row.
        file.set_len(CELL_BYTES + (3 + u64::from(RANKS_MAX)) * ROW_BYTES as u64)?;
        Ok(Self { file })
    }

    /// The board at `path`.
    pub(crate) fn open(path: &Path) -> Outcome<Self> {
        Ok(Self { file: OpenOptions::new().read(true).write(true).open(path)? })
    }

    /// Has all kernels give up, as aborting a communicator does.
    pub(crate) fn abort(&self) -> Outcome {
        Ok(self.file.write_all_at(&1_u64.to_le_bytes(), 0)?)
    }

    /// Are they to give up?
    pub(crate) fn is_aborted(&self) -> std::io::Result<bool> {
        let mut cell = [0; 8];
        self.file.read_exact_at(&mut cell, 0)?;
        Ok(u64::from_le_bytes(cell) != 0)
    }

    /// The kernel of `rank` has come to its launch number `count` on `lane`.
    pub(super) fn arrive(&self, lane: u32, rank: u32, count: u64) -> std::io::Result<()> {
        let at = row_offset(lane) + CELL_BYTES * u64::from(rank);
        self.file.write_all_at(&count.to_le_bytes(), at)
    }

    /// Have all of `ranks` come to `count` on `lane`?
    pub(super) fn have_arrived(
        &self,
        lane: u32,
        ranks: &[u32],
        count: u64,
    ) -> std::io::Result<bool> {
        let mut row = [0; ROW_BYTES];
        self.file.read_exact_at(&mut row, row_offset(lane))?;
        let cells = row.as_chunks::<8>().0;
        let arrived = |rank: &u32| u64::from_le_bytes(cells[*rank as usize]) >= count;
        Ok(ranks.iter().all(arrived))
    }
}

fn row_offset(lane: u32) -> u64 {
    CELL_BYTES + u64::from(lane) * ROW_BYTES as u64
}
