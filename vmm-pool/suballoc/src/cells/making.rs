//! The creation and end of slabs: they are made for cells, mapped in windows, and taken down.

use vmm_pool::driver::{AccessDesc, DeviceAddress, Driver, VaRange};
use vmm_pool::{Describe, Entered, Inside, PoolError, PoolResult, VirtualHandle};

use crate::slabs::{Ended, NewSlab, Recipe, SlabKey, Slabs};

impl Slabs {
    pub(super) fn cell<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        size_bytes: u64,
        recipe: &Recipe,
        slab_bytes: u64,
    ) -> Option<VirtualHandle> {
        let with_room = self.table().with_room(size_bytes, recipe);
        let carved = with_room.into_iter().find_map(|(key, row)| {
            entered.check_here(row).is_ok().then(|| self.table().carve(key, size_bytes))?
        });
        if carved.is_some() {
            return carved;
        }
        let made = self.make_slab(entered, slab_bytes, size_bytes, recipe);
        let key = made.inspect_err(|error| {
            tracing::debug!(%error, "no slab could be made: the allocation stands alone");
        });
        let key = key.ok()??;
        let cell = self.table().carve(key, size_bytes);
        if cell.is_none() {
            let ended = self.table().end_empty(key);
            self.take_down(entered, ended);
        }
        cell
    }

    /// Makes a slab with room for a cell of `cell_bytes`. `None` if the device's unit does not divide that size.
    fn make_slab<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        slab_bytes: u64,
        cell_bytes: u64,
        recipe: &Recipe,
    ) -> PoolResult<Option<SlabKey>> {
        let (prop, device) = (&recipe.prop, recipe.prop.location.as_device());
        let unit = entered.pool().driver().allocation_granularity(prop);
        let unit = unit.about(|| "new slab".to_owned(), slab_bytes, device)?;
        let (Some(size_bytes), Some(device)) = (unit.round_up(slab_bytes), device) else {
            return Ok(None);
        };
        if !cell_bytes.is_multiple_of(unit.size_bytes) {
            return Ok(None);
        }
        let row = entered.create(size_bytes, prop, recipe.class.clone())?;
        let access = [AccessDesc::read_write(device)];
        let window = map_window(entered, row, size_bytes, unit.size_bytes, &access)?;
        let (id, _) = entered.identity(row)?;
        let recipe = Some((recipe.clone(), unit.size_bytes));
        let new = NewSlab { row, id, size_bytes, prop: *prop, recipe };
        Ok(Some(self.table().insert(new, window, &access)))
    }

    /// Takes down slabs and windows that nobody has any more. The caller's call is done already: parts that the driver refuses
    /// are tried again with the next call.
    pub(super) fn take_down<D: Driver>(&self, inside: &Inside<'_, D>, ended: Ended) {
        let mut all = std::mem::take(&mut self.table().refused);
        all.push(ended);
        for ended in all {
            if let Some(left) = self.try_take_down(inside, ended) {
                self.table().refused.push(left);
                // Threads that wait for this need to hear of it.
                self.changed.notify_all();
            }
        }
    }

    /// Takes `ended` down. Returns the part that the driver refused.
    fn try_take_down<D: Driver>(&self, inside: &Inside<'_, D>, mut ended: Ended) -> Option<Ended> {
        while let Some((window, mounted)) = ended.mounted.last().copied() {
            match inside.unmap(mounted) {
                Ok(()) | Err(PoolError::NotOurs) => ended.mounted.pop(),
                Err(error) => {
                    tracing::error!(%error, "a slab that nobody has there stays until the next call like this");
                    return Some(ended);
                }
            };
            ended.windows.extend(self.table().windows.dismounted(window));
            self.changed.notify_all();
        }
        if let Some(row) = ended.row
            && let Err(error) = inside.release(row)
        {
            // The memory is gone from the ledger, and is offered to the driver again.
            tracing::error!(%error, "memory of a slab stays until the next pause");
        }
        for window in ended.windows {
            if let Err(error) = inside.pool().deferred().free_addresses(window) {
                tracing::error!(%error, "addresses of a slab stay until the next pause");
            }
        }
        None
    }
}

/// Maps the slab `row` in a new window. If that fails, the reference to the row is used up.
pub(super) fn map_window<D: Driver>(
    entered: &Entered<'_, D>,
    row: VirtualHandle,
    size_bytes: u64,
    alignment_bytes: u64,
    access: &[AccessDesc],
) -> PoolResult<VaRange> {
    let driver = entered.pool().driver();
    let reserved = driver.address_reserve(size_bytes, alignment_bytes, DeviceAddress(0));
    let reserved = reserved.inspect_err(|_| entered.abandon(None, row));
    let start = reserved.about(|| "window of a slab".to_owned(), size_bytes, None)?;
    let window = VaRange::new(start, size_bytes);
    let mapped = entered.map(window, 0, row).and_then(|()| match access {
        [] => Ok(()),
        access => entered.set_access(window, access),
    });
    mapped.map(|()| window).inspect_err(|_| entered.abandon(Some(window), row))
}
