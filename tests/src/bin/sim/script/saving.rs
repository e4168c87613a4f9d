//! Now and then what a paused tenant has saved is written to files, and every byte of them is looked at.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use sublet_tests::{Outcome, Trouble};
use tenants::coordinator::{Coordinator, Options, Trouble as Told};
use tenants::keep;
use tenants::keep::map::{ProcessMap, TENANT_MAP, TenantMap};
use vmm_pool::driver::sim::SOIL;

use super::Script;
use crate::worker::writer_of;

const PAGE_LENGTH: usize = 4096;

impl Script {
    /// Saves a tenant that stands paused with nothing in its way.
    pub(super) fn save(&mut self, tenant: usize) -> Outcome {
        let dir = tempfile::Builder::new().prefix("sublet-sim-save-").tempdir_in("/dev/shm")?;
        // It makes one itself that is closed to others.
        let path = dir.path().join("saved");
        let run_dir = self.world.desk.run_dir.clone();
        let found = &self.world.tenants[tenant];
        let coordinator = Coordinator::new(run_dir, found.name.clone(), Options::default());
        match keep::save(&coordinator, &path, &mut |_| {}) {
            Ok(_) => {}
            // All of it is discarded or imported.
            Err(Told::NothingSaved { .. }) => return Ok(()),
            Err(error) => {
                return Err(Trouble::new(format!("what is saved was not written: {error}")));
            }
        }
        let map: TenantMap = serde_json::from_slice(&fs::read(path.join(TENANT_MAP))?)?;
        if !map.complete {
            return Err(Trouble::new(format!("not all has been written: {map:?}")));
        }
        let mut bytes = 0;
        for process in &map.processes {
            let mut workers = found.workers.iter();
            let worker = workers.find(|worker| worker.pid() == process.process.pid);
            let worker = worker.ok_or_else(|| Trouble::new("files of an unknown process"))?;
            bytes += compare(&path, &process.map, worker.number)?;
        }
        self.world.tally.saved_bytes += bytes;
        self.world.tally.saves += 1;
        Ok(())
    }
}

/// Each page must hold one pattern of this worker's own, or nothing. Returns how much was looked at.
fn compare(dir: &Path, name: &str, worker: u64) -> Outcome<u64> {
    let map: ProcessMap = serde_json::from_slice(&fs::read(dir.join(name))?)?;
    let Some(data) = &map.data else {
        return Ok(0);
    };
    let file = File::open(dir.join(data))?;
    let mut compared = 0;
    for allocation in &map.allocations {
        let Some(at) = allocation.file_offset else {
            continue;
        };
        for part in &allocation.saved {
            // Page by page: a buffer of the size of a slab would stay in this process, which must not grow.
            let end = part.offset + part.bytes;
            let mut seen = [0_u8; PAGE_LENGTH];
            for offset in (part.offset..end).step_by(PAGE_LENGTH) {
                let length = usize::try_from(end - offset)?.min(PAGE_LENGTH);
                let page = &mut seen[..length];
                file.read_exact_at(page, at + offset)?;
                if let Some(rest) = page.strip_prefix(SOIL)
                    && rest.iter().all(|byte| *byte == 0)
                {
                    // The beginning of memory that nobody has written.
                    continue;
                }
                let words = page.as_chunks::<8>().0;
                let pattern = words.first().copied().unwrap_or_default();
                let writer = writer_of(u64::from_le_bytes(pattern));
                let is_known = writer == worker || pattern == [0; 8];
                if !is_known || words.iter().any(|word| *word != pattern) {
                    return Err(Trouble::new(format!(
                        "what worker {worker} has saved is not what it wrote: {allocation:?}"
                    )));
                }
            }
            compared += part.bytes;
        }
    }
    Ok(compared)
}
