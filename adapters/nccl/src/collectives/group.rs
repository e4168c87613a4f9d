//! The calls that a thread has gathered between `ncclGroupStart` and `ncclGroupEnd`.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use tenants::cut::{Counter, Increment};

use super::communicators::Communicator;
use super::lifecycle::Newcomer;

/// The calls of one group of one thread. They launch nothing before the group's end.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// The increments to launch when the group ends.
    pub(super) increments: Vec<Increment>,
    /// Communicators that the group calls.
    pub(super) touched: Vec<Arc<Communicator>>,
    /// Work that few groups have: `PyTorch` brackets every collective with a group.
    pub(super) rare: Option<Box<Rare>>,
}

/// The work of a group in addition to its launches.
#[derive(Debug, Default)]
pub(super) struct Rare {
    /// The increments to record into captures when the group ends.
    pub(super) captured: Vec<(u64, Vec<Increment>)>,
    /// Communicators that the group splits, once for each split.
    pub(super) splits: Vec<Arc<Communicator>>,
    /// Communicators that the group makes.
    pub(super) newcomers: Vec<Newcomer>,
    /// Communicators that the group ends.
    pub(super) leaving: Vec<Arc<Communicator>>,
}

impl Group {
    pub(super) fn touch(&mut self, communicator: &Arc<Communicator>) {
        if !self.touched.iter().any(|known| Arc::ptr_eq(known, communicator)) {
            self.touched.push(Arc::clone(communicator));
        }
    }

    pub(super) fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    /// Returns the seats that must still be taken when the group ends, in addition to those of `increments`. Groups of
    /// collectives have none.
    pub(super) fn other_seats(&self, increments: &[Increment]) -> Vec<Arc<Counter>> {
        let is_other = |seat: &&Arc<Counter>| {
            !increments.iter().any(|increment| Arc::ptr_eq(&increment.counter, seat))
        };
        let touched = self.touched.iter().map(|communicator| communicator.seat());
        let newcomers = self.rare.iter().flat_map(|rare| &rare.newcomers);
        let newcomers = newcomers.filter_map(Newcomer::needed);
        touched.filter(is_other).cloned().chain(newcomers).collect()
    }

    /// Returns the increments, merged to one for each counter.
    pub(super) fn merged_increments(&mut self) -> Vec<Increment> {
        let mut increments = std::mem::take(&mut self.increments);
        if increments.len() > 1 {
            increments.sort_by_key(|increment| Arc::as_ptr(&increment.counter).addr());
            increments.dedup_by(|next, kept| {
                let same = Arc::ptr_eq(&next.counter, &kept.counter);
                if same {
                    kept.launches += next.launches;
                }
                same
            });
        }
        increments
    }
}

/// Leaves the buffers of an ended group to the thread's next group, which then allocates nothing for its calls.
pub(super) fn leave_room(mut increments: Vec<Increment>, mut touched: Vec<Arc<Communicator>>) {
    if increments.capacity() == 0 && touched.capacity() == 0 {
        return;
    }
    increments.clear();
    touched.clear();
    gather(|next| {
        if next.increments.capacity() == 0 {
            next.increments = increments;
        }
        if next.touched.capacity() == 0 {
            next.touched = touched;
        }
    });
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static GROUP: RefCell<Group> = RefCell::default();
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Is this thread between a start and an end?
pub(super) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// Records that a start has succeeded.
pub(super) fn start() {
    DEPTH.set(DEPTH.get() + 1);
}

/// Records that an end is about to be called. Returns the group that it will launch, if it is the outermost end.
pub(super) fn end() -> Option<Group> {
    let depth = DEPTH.get();
    DEPTH.set(depth.saturating_sub(1));
    if depth != 1 {
        return None;
    }
    // A thread that is ending has lost its gathered calls; its last calls go uncounted.
    GROUP.try_with(RefCell::take).ok()
}

/// Adds to this thread's group.
pub(super) fn gather(add: impl FnOnce(&mut Group)) {
    let _gathered = GROUP.try_with(|group| add(&mut group.borrow_mut()));
}

/// Is this thread inside a call of NCCL's that we have counted? NCCL's own calls then are part of it.
pub(super) fn is_inside() -> bool {
    IS_INSIDE.get()
}

/// Runs NCCL's own function as a counted call.
pub(super) fn inside<T>(call: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IS_INSIDE.set(false);
        }
    }
    IS_INSIDE.set(true);
    let _leave = Leave;
    call()
}
