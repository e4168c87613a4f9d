//! Parts of slabs that come from other processes.

use vmm_pool::driver::{Driver, DriverCode, DriverOp};
use vmm_pool::{AllocationId, Entered, Part, PoolResult, VirtualHandle};

use super::making::map_window;
use super::{refused, this_thread};
use crate::slabs::{Ended, NewSlab, Slabs};

impl Slabs {
    /// Returns a reference to `part` of the slab `id`, instead of one to its whole row.
    pub(super) fn hold_part<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        id: AllocationId,
        row: VirtualHandle,
        part: Part,
    ) -> PoolResult<VirtualHandle> {
        let known = {
            let mut slabs = self.table();
            slabs.slab_of(id).map(|(key, _)| slabs.hold_part(key, part))
        };
        if let Some(held) = known {
            // The slab has a reference of its own.
            entered.release(row)?;
            return self.aimed_at(held, part);
        }
        let (prop, (_, size_bytes)) = (entered.properties(row)?, entered.identity(row)?);
        let window = map_window(entered, row, size_bytes, 0, &[])?;
        let (held, ended, is_ours) = {
            let mut slabs = self.table();
            // Another thread may have imported the slab meanwhile.
            let known = slabs.slab_of(id).map(|(key, _)| key);
            let is_ours = known.is_none();
            let key = known.unwrap_or_else(|| {
                let new = NewSlab { row, id, size_bytes, prop, recipe: None };
                slabs.insert(new, window, &[])
            });
            let held = slabs.hold_part(key, part);
            (held, if is_ours { slabs.end_empty(key) } else { Ended::default() }, is_ours)
        };
        if !is_ours {
            entered.abandon(Some(window), row);
        }
        self.take_down(entered, ended);
        self.aimed_at(held, part)
    }

    fn aimed_at(&self, held: Option<VirtualHandle>, part: Part) -> PoolResult<VirtualHandle> {
        self.table().aim(this_thread(), held);
        held.ok_or_else(|| {
            let object = format!("part of a slab at {}", part.offset_bytes);
            refused(DriverOp::Import, DriverCode::INVALID_VALUE, object, part.size_bytes)
        })
    }
}
