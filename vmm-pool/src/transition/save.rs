//! Saves contents to host memory or the disk, and then unmaps their memory.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::{BTreeMap, VecDeque};

use super::copier::{Copier, Transfer};
use super::release::Meanwhile;
use super::still::Still;
use crate::copies::Way;
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, VaRange};
use crate::error::PoolResult;
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::{Layout, Placed, Rows, Survey};
use crate::report::KeptBytes;
use crate::store::{Copies, HostArena, HostBudget, Pins, Saved};

#[derive(Debug)]
pub(super) struct Item {
    row: VirtualHandle,
    saved: Saved,
    /// The extents that are copied, from one of the row's own mappings, or from a view made for the copy.
    transfer: Transfer,
    copied_bytes: u64,
    view: bool,
}

impl Item {
    /// Returns the end of its last copy in the arena, in bytes.
    fn end_bytes(&self) -> u64 {
        self.transfer.extents.iter().map(|extent| extent.place().end).max().unwrap_or(0)
    }
}

/// The allocations that a pause saves, by destination.
#[derive(Debug, Default)]
struct Plan {
    /// The allocations of which nothing is copied.
    as_is: Vec<Item>,
    groups: Vec<Group>,
    to_file: Vec<Item>,
    kept: KeptBytes,
}

impl Plan {
    /// Returns the allocations that are copied.
    fn items(&self) -> impl Iterator<Item = &Item> {
        self.groups.iter().flat_map(|group| &group.items).chain(&self.to_file)
    }
}

/// The treatment of memory whose contents are saved, while other contents are still being copied.
#[derive(Debug)]
pub(super) enum Behind<'a> {
    /// The memory is unmapped and kept, for an undo, or until all is saved.
    Keeps(&'a Rows),
    /// The memory is released, after the point of no return.
    GivesBack(Meanwhile<'a>),
}

impl<'a> Behind<'a> {
    fn rows(&self) -> &'a Rows {
        match self {
            Self::Keeps(rows) => rows,
            Self::GivesBack(meanwhile) => meanwhile.rows(),
        }
    }
}

/// Adjacent allocations on one device that are copied together.
#[derive(Debug)]
struct Group {
    device: DeviceOrdinal,
    items: Vec<Item>,
}

/// Makes groups of adjacent allocations of one device, and alternates between devices.
fn in_groups(items: Vec<Item>, group_bytes: u64) -> Vec<Group> {
    let mut by_device: BTreeMap<DeviceOrdinal, (Vec<Group>, u64)> = BTreeMap::new();
    for item in items {
        let (device, size_bytes) = (item.transfer.device, item.copied_bytes);
        let (groups, last_bytes) = by_device.entry(device).or_default();
        match groups.last_mut() {
            Some(group) if *last_bytes < group_bytes => {
                group.items.push(item);
                *last_bytes += size_bytes;
            }
            _ => {
                groups.push(Group { device, items: vec![item] });
                *last_bytes = size_bytes;
            }
        }
    }
    let mut queues: Vec<_> =
        by_device.into_values().map(|(groups, _)| groups.into_iter()).collect();
    let mut groups = Vec::new();
    while !queues.is_empty() {
        queues.retain_mut(|queue| queue.next().map(|group| groups.push(group)).is_some());
    }
    groups
}

impl<D: Driver> Still<'_, D> {
    /// Saves contents to their places in the layouts. Disk space for them is reserved already. Missing host memory is
    /// populated during the copies. The bytes of `log` are those that it has copied, also if it fails.
    pub(super) fn save(
        &self,
        log: &mut StepLog,
        mut behind: Behind<'_>,
        [kept, filed]: [Layout; 2],
    ) -> PoolResult<()> {
        self.pool.deferred.settle()?;
        let mut copier = Copier::new(self.pool);
        // From here on a copy is valid only if nothing of it changes.
        self.pool.ledger().rows.forget_copies(&kept);
        let end_bytes = kept.end_bytes;
        let planned = log.timed("plan", |log| {
            let plan = self.plan(log, kept, filed)?;
            for item in plan.items() {
                copier.streams.of(item.transfer.device)?;
            }
            Ok(plan)
        });
        let outcome = planned.and_then(|plan| {
            let host = self.pool.host_memory();
            host.begin_growth(end_bytes, !plan.to_file.is_empty());
            let kept = self.save_to_memory(log, &mut behind, &mut copier, &plan);
            host.arena().end_growth();
            kept.and_then(|()| self.save_to_file(log, &mut copier, &plan.to_file))?;
            Ok(plan.kept)
        });
        if outcome.is_err() {
            // Copies may still read: nothing may be unmapped or reused before they have ended.
            if let Err(error) = copier.streams.finish_or_leave() {
                tracing::error!(%error, "copies did not finish after a failed save");
            }
            if self.pool.deferred.is_settled() {
                self.drop_views(log);
                self.pool.ledger().rows.void_copies();
            }
        }
        log.kept = Some(outcome?);
        Ok(())
    }

    /// Returns places for all contents, in host memory and in the file. Keeps as many of `copies` as there is room for.
    /// The others are given up, and a note says so once.
    pub(super) fn layouts_within(
        &self,
        arena: &HostArena<D>,
        rows: &Rows,
        survey: &Survey,
        copies: Copies,
        budget: HostBudget,
    ) -> PoolResult<([Layout; 2], Option<String>)> {
        let mut fits = Ok(());
        for copies in Copies::FEWER.into_iter().filter(|fewer| *fewer <= copies) {
            let [kept, filed] = self.pool.host_memory().layouts(rows, survey, copies);
            let file_bytes = filed.end_bytes;
            let grow_bytes = arena.growth(kept.end_bytes, file_bytes > 0);
            let needed_bytes = kept.end_bytes + file_bytes;
            fits = HostArena::<D>::check_budget(needed_bytes, grow_bytes, budget);
            if fits.is_err() {
                continue;
            }
            let given_up = self.pool.ledger().rows.give_copies_up(rows, copies);
            let is_told = given_up > 0 && self.pool.copies.tells_of_room();
            let note = is_told.then(|| {
                format!(
                    "host memory had no room for {given_up} bytes of copies of the last pause: what they hold is copied \
                     again by its next pause; allow more host memory, or set SUBLET_CHANGES=off (said once)"
                )
            });
            return Ok(([kept, filed], note));
        }
        fits.map(|()| Default::default())
    }

    /// Writes contents to the file, then unmaps their memory.
    fn save_to_file(
        &self,
        log: &mut StepLog,
        copier: &mut Copier<'_, D>,
        items: &[Item],
    ) -> PoolResult<()> {
        if items.is_empty() {
            return Ok(());
        }
        let filed: Vec<_> = items.iter().map(|item| &item.transfer).collect();
        // SAFETY: sources stay mapped until all of them are written.
        unsafe { copier.write_file(log, &filed) }?;
        log.bytes += items.iter().map(|item| item.copied_bytes).sum::<u64>();
        log.timed("unmap saved", |log| self.retire(log, items))
    }

    /// Copies contents to the arena, group by group, and unmaps memory that is copied while other copies run.
    fn save_to_memory(
        &self,
        log: &mut StepLog,
        behind: &mut Behind<'_>,
        copier: &mut Copier<'_, D>,
        plan: &Plan,
    ) -> PoolResult<()> {
        let rows = behind.rows();
        // Pinned for all devices, even if this pause is of one of them: the next pause uses this host memory too.
        let pins = Pins::of(&self.pool.holdings().devices());
        if !plan.groups.is_empty() {
            self.pool.host_memory().arena().pin_again(log, pins)?;
        }
        // Two groups may be under way on a device. When the third is queued, the first has ended.
        let mut in_flight: BTreeMap<DeviceOrdinal, VecDeque<&Group>> = BTreeMap::new();
        for (number, group) in plan.groups.iter().enumerate() {
            let copies = copier.streams.of(group.device)?;
            log.timed("wait for copies", |_| copies.take_idle())?;
            let flying = in_flight.entry(group.device).or_default();
            let done = if flying.len() == 2 { flying.pop_front() } else { None };
            flying.push_back(group);
            let end_bytes = group.items.iter().map(Item::end_bytes).max().unwrap_or(0);
            self.pool.host_memory().arena().grow_to(log, end_bytes, pins)?;
            log.timed("queue copies", |log| {
                group.items.iter().try_for_each(|item| {
                    // SAFETY: the source stays mapped until its group is retired below, after its stream is done; the
                    // arena's place is this item's alone.
                    unsafe { copier.start(log, Way::Out, &item.transfer) }
                })
            })?;
            if number == 0 {
                self.unmap_uncopied(log, rows, plan)?;
            }
            if let Some(done) = done {
                self.leave_behind(log, behind, done)?;
            }
        }
        if plan.groups.is_empty() {
            self.unmap_uncopied(log, rows, plan)?;
        }
        for (device, flying) in in_flight {
            let copies = copier.streams.of(device)?;
            log.timed("wait for copies", |_| copies.finish_all())?;
            for group in flying {
                self.leave_behind(log, behind, group)?;
            }
        }
        Ok(())
    }

    /// Records that all of `group` is copied, and unmaps it.
    fn leave_behind(
        &self,
        log: &mut StepLog,
        behind: &mut Behind<'_>,
        group: &Group,
    ) -> PoolResult<()> {
        let copied_bytes = group.items.iter().map(|item| item.copied_bytes).sum();
        self.pool.copied.add(copied_bytes);
        log.bytes += copied_bytes;
        log.timed("unmap saved", |log| self.retire(log, &group.items))?;
        if let Behind::GivesBack(meanwhile) = behind {
            meanwhile.are_saved(group.items.iter().map(|item| item.row));
            log.timed("give back", |log| {
                self.give_back_meanwhile(log, meanwhile);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Unmaps the memory that no copy reads: imports, and memory whose copy is current already.
    fn unmap_uncopied(&self, log: &mut StepLog, rows: &Rows, plan: &Plan) -> PoolResult<()> {
        log.timed("unmap imports", |log| self.unmap_imports(log, rows))?;
        if plan.as_is.is_empty() {
            return Ok(());
        }
        log.timed("unmap unchanged", |log| self.retire(log, &plan.as_is))
    }

    /// Records that contents are saved, and unmaps every mapping of them.
    fn retire(&self, log: &mut StepLog, items: &[Item]) -> PoolResult<()> {
        for item in items {
            if item.view {
                self.drop_view(log, item.transfer.range)?;
            }
            let ranges = self.pool.ledger().saved(item.row, item.saved.clone());
            for range in ranges {
                self.unmap(log, range)?;
            }
        }
        Ok(())
    }

    /// Plans the work for both layouts.
    fn plan(&self, log: &mut StepLog, kept: Layout, filed: Layout) -> PoolResult<Plan> {
        let mut plan = Plan::default();
        for placed in kept.placed.iter().chain(&filed.placed) {
            let copied_bytes = placed.copied_bytes();
            let held: u64 = placed.saved.extents.iter().map(|extent| extent.size_bytes).sum();
            let unchanged_bytes =
                if placed.saved.prints.is_some() { held - copied_bytes } else { 0 };
            let zero_bytes = placed.zero_bytes;
            plan.kept = plan.kept.plus(KeptBytes { zero_bytes, unchanged_bytes, copied_bytes });
        }
        let (copied, as_is) =
            self.plan_items(log, kept)?.into_iter().partition(|item| item.copied_bytes > 0);
        plan.groups = in_groups(copied, self.pool.copies.group_bytes());
        plan.as_is = as_is;
        let (to_file, as_is): (Vec<_>, Vec<_>) =
            self.plan_items(log, filed)?.into_iter().partition(|item| item.copied_bytes > 0);
        plan.to_file = to_file;
        plan.as_is.extend(as_is);
        Ok(plan)
    }

    /// Returns all allocations that `layout` has a place for, each with a range where its device can read it.
    fn plan_items(&self, log: &mut StepLog, layout: Layout) -> PoolResult<Vec<Item>> {
        let mut items = Vec::with_capacity(layout.placed.len());
        for placed in layout.placed {
            let (device, readable, raw, size_bytes) = {
                let ledger = self.pool.ledger();
                let Some(found) = ledger.rows.get(placed.row) else { continue };
                let Some(device) = found.device() else { continue };
                let readable = ledger.mappings.readable(found);
                (device, readable, found.raw(), found.size_bytes())
            };
            let copied_bytes = placed.copied_bytes();
            let (range, view) = match (readable, raw) {
                (Some(range), _) => (range, false),
                // No copy reads it.
                (None, _) if copied_bytes == 0 => {
                    (VaRange::new(DeviceAddress(0), size_bytes), false)
                }
                (None, Some(raw)) => (self.make_view(log, raw, size_bytes, device)?, true),
                (None, None) => continue,
            };
            let Placed { row, saved, copied: extents, .. } = placed;
            let transfer = Transfer { device, range, extents };
            items.push(Item { row, saved, transfer, copied_bytes, view });
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests;
