//! Physical memory that changes hands in a swap: what one tenant releases, the other takes in place of new memory, where
//! both have allocations of one shape.
//!
//! Whoever leaves exports a handle and releases it, so that a descriptor is all that holds the memory; whoever drops that
//! gives the memory back to the driver. Whoever comes imports it. From then on it holds the other tenant's bytes, so
//! nothing is done with it before all of it has been made zero, on the stream that fills it, behind a gate that has been
//! shut since before ([`crate::deferred::Physical::holds_others_bytes`]). Undone, it goes back to the driver, which clears
//! it for whoever is next. Shared memory never changes hands: others may have it mapped, or will ask for it.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd as _;

use serde::{Deserialize, Serialize};

use super::restore::Room;
use super::still::Still;
use crate::VirtualHandle;
use crate::deferred::Physical;
use crate::descriptors::UninheritedFd;
use crate::driver::{
    ALLOCATION_KIND_PINNED, AllocationFlags, DeviceOrdinal, Driver, HANDLE_TYPE_POSIX_FD, RawHandle,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Row, Selection};
use crate::pool::Pool;
use crate::store::Store;

/// What two allocations have in common when the memory of one can be that of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Where it is, by this process's number.
    pub device: DeviceOrdinal,
    /// How large it is.
    pub size_bytes: u64,
    /// How it was made, besides being pinned and exportable as a descriptor, and nothing else.
    pub flags: AllocationFlags,
    /// Was it asked for by address (`cuMemAlloc`), so that the application has no handle that it could join to others' memory by?
    pub is_plain: bool,
}

/// How many allocations there are of each shape.
pub type Shapes = BTreeMap<Shape, usize>;

/// Memory between two owners. Dropped, it is the driver's again.
#[derive(Debug)]
#[must_use = "dropped, it is no use to the one that comes"]
pub struct Handed {
    /// What it can stand in for.
    pub shape: Shape,
    /// All that holds it.
    pub fd: UninheritedFd,
}

/// The shape of memory that may change hands.
fn shape_of(row: &Row) -> Option<Shape> {
    let prop = row.prop();
    let is_usual = prop.kind == ALLOCATION_KIND_PINNED
        && prop.requested_handle_types == HANDLE_TYPE_POSIX_FD
        && prop.win32_handle_metadata == 0;
    let is_private = row.is_own() && !row.is_shared() && !row.is_exported();
    let device = row.device().filter(|_| is_usual && is_private)?;
    let is_plain = row.block_size_bytes().is_some();
    Some(Shape { device, size_bytes: row.size_bytes(), flags: prop.flags, is_plain })
}

/// The shape of memory that another's may come back as. What is read from a file is written by other streams than what is made zero.
pub(super) fn wanted_shape(row: &Row) -> Option<Shape> {
    let is_from_file = row.saved().is_some_and(|saved| saved.store == Store::File);
    if row.is_resident() || is_from_file { None } else { shape_of(row) }
}

impl<D: Driver> Pool<D> {
    /// What of `selection` could be handed over, and is on its device.
    pub fn shapes_to_give(&self, selection: &Selection) -> Shapes {
        self.shapes(|row| {
            let leaves = row.is_resident() && row.can_leave() && selection.has(row);
            if leaves { shape_of(row) } else { None }
        })
    }

    /// What of `selection` is away and could come back as another's memory; none of a process that
    /// runs: work of its own may be under way, and reach what is mapped before it is cleared.
    pub fn shapes_to_take(&self, selection: &Selection) -> Shapes {
        let runs = matches!(selection, Selection::SetAside(..));
        if runs {
            return Shapes::new();
        }
        self.shapes(|row| if selection.has(row) { wanted_shape(row) } else { None })
    }

    fn shapes(&self, shape_of: impl Fn(&Row) -> Option<Shape>) -> Shapes {
        let mut shapes = Shapes::new();
        for shape in self.ledger().rows().filter_map(shape_of) {
            *shapes.entry(shape).or_insert(0) += 1;
        }
        shapes
    }
}

impl<D: Driver> Still<'_, D> {
    /// Exports as many allocations of each shape as are `wanted`, of those that `choose` picks and that are nowhere
    /// mapped. Their handles are to be released next; what could not be exported is released as any memory. So is all
    /// while a view is left: nobody knows of which memory it is, and it would show this process what is another's.
    pub(super) fn export_wanted(
        &self,
        log: &mut StepLog,
        wanted: &Shapes,
        choose: impl Fn(&Row) -> bool,
    ) -> HashMap<RawHandle, Handed> {
        let mut exported = HashMap::new();
        if wanted.is_empty() {
            return exported;
        }
        let views = self.pool.ledger().views().len();
        if views > 0 {
            log.notes.push(format!(
                "released in place of being handed over: {views} place(s) made for a copy are still mapped"
            ));
            return exported;
        }
        let mut open = wanted.clone();
        let chosen: Vec<(VirtualHandle, RawHandle, Shape)> = {
            let ledger = self.pool.ledger();
            let unmapped = ledger.rows().filter(|row| {
                let mut mappings = ledger.mappings_of(row);
                choose(row) && mappings.all(|mapping| !mapping.is_present())
            });
            let of_shape = unmapped.filter_map(|row| {
                let shape = shape_of(row)?;
                let open = open.get_mut(&shape).filter(|open| **open > 0)?;
                *open -= 1;
                Some((row.handle(), row.raw()?, shape))
            });
            of_shape.collect()
        };
        for (row, raw, shape) in chosen {
            let from = self.pool.ledger().row(row).and_then(Row::descriptor_from);
            let Some(from) = from else { continue };
            log.call();
            let fd = self.pool.descriptor(from);
            let about = || "export for the next tenant".to_owned();
            match fd.about(about, shape.size_bytes, Some(shape.device)) {
                Ok(fd) => drop(exported.insert(raw, Handed { shape, fd: fd.into() })),
                Err(error) => {
                    log.notes.push(format!("released in place of being handed over: {error}"));
                    break;
                }
            }
        }
        exported
    }

    /// Takes `handed` in place of creating memory for what of `missing` is away and has the same shape. What cannot be
    /// used is given back to the driver, and what it was to stand in for stays away. Says what was taken.
    ///
    /// # Errors
    /// [`PoolError::OverBudget`] and nothing taken, where `room` is to be asked for.
    ///
    /// # Driver calls
    /// `cuMemImportFromShareableHandle`.
    pub(super) fn take_over(
        &self,
        log: &mut StepLog,
        selection: &Selection,
        handed: Vec<Handed>,
        room: Room,
    ) -> PoolResult<Shapes> {
        let pairs = self.pair_up(selection, handed);
        let wanted: Vec<_> = {
            let ledger = self.pool.ledger();
            let rows = pairs.iter().filter_map(|(row, _)| ledger.row(*row));
            rows.map(|row| (row.handle(), row.size_bytes(), *row.prop())).collect()
        };
        let mut room = self.take_room(room, &wanted)?;
        let mut taken = Vec::new();
        for (row, Handed { shape, fd }) in pairs {
            let Shape { device, size_bytes, .. } = shape;
            log.call();
            let about = || "import from the tenant before".to_owned();
            let imported = self.pool.driver.import_fd(fd.as_fd());
            let raw = match imported.about(about, size_bytes, Some(device)) {
                Ok(raw) => raw,
                Err(error) => {
                    log.notes.push(refusal(&error));
                    break;
                }
            };
            let charge = room.get_mut(&device).and_then(|room| room.split(size_bytes));
            let physical = Physical::new(raw, size_bytes, Some(device)).charged(charge);
            taken.push((row, shape, physical.handed_over(fd)));
        }
        let mut shapes = Shapes::new();
        let unwanted: Vec<Physical> = {
            let mut ledger = self.pool.ledger();
            let entered = taken.into_iter().map(|(row, shape, mut physical)| {
                physical.charge_with(|size, device| self.pool.budget.charge_anyway(device, size));
                let unwanted = ledger.returned(row, physical);
                if unwanted.is_none() {
                    *shapes.entry(shape).or_insert(0) += 1;
                }
                unwanted
            });
            entered.flatten().collect()
        };
        self.release_all(log, unwanted);
        Ok(shapes)
    }

    /// What is away and wants what was handed over. The rest of that is dropped.
    fn pair_up(&self, selection: &Selection, handed: Vec<Handed>) -> Vec<(VirtualHandle, Handed)> {
        let mut at_hand: HashMap<Shape, Vec<Handed>> = HashMap::new();
        for one in handed {
            at_hand.entry(one.shape).or_default().push(one);
        }
        let ledger = self.pool.ledger();
        let missing = ledger.rows().filter(|row| selection.has(row));
        missing
            .filter_map(|row| {
                let one = at_hand.get_mut(&wanted_shape(row)?)?.pop()?;
                Some((row.handle(), one))
            })
            .collect()
    }
}

fn refusal(error: &PoolError) -> String {
    format!("created in place of being taken over: {error}")
}
