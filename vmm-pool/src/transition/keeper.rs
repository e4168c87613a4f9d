//! The right to begin a pause or resume: one at a time, from the present mode of the gate.
//!
//! [`Pool::new`] returns the only [`Keeper`]. Each pause or resume consumes it when it begins, so there is no second
//! one until the first has ended:
//!
//! ```
//! # use vmm_pool::{Keeper, driver::Driver};
//! fn begin<D: Driver>(keeper: Keeper<D>) {
//!     let first = keeper.close();
//! }
//! ```
//! ```compile_fail,E0382
//! # use vmm_pool::{Keeper, driver::Driver};
//! fn begin<D: Driver>(keeper: Keeper<D>) {
//!     let first = keeper.close();
//!     let second = keeper.close();
//! }
//! ```
//!
//! A process that runs can only create memory again that is set aside. A process whose memory is off its devices
//! creates all of it:
//!
//! ```
//! # use vmm_pool::{Aside, Away, FromOffloaded, FromOpen, Shut, driver::Driver};
//! fn come<D: Driver>(runs: Shut<D, FromOpen>, is_away: Shut<D, FromOffloaded>, tags: Aside) {
//!     let some = runs.create_own(tags);
//!     let all = is_away.create_own(Away::Whole);
//! }
//! ```
//! ```compile_fail,E0308
//! # use vmm_pool::{Away, FromOpen, Shut, driver::Driver};
//! fn come<D: Driver>(runs: Shut<D, FromOpen>) {
//!     let all = runs.create_own(Away::Whole);
//! }
//! ```
//!
//! Calls that use memory are let in only if all memory is on its devices:
//!
//! ```
//! # use vmm_pool::{FromOpen, Shut, driver::Driver};
//! fn step<D: Driver>(runs: Shut<D, FromOpen>) {
//!     let let_in = runs.into_draining().step_all();
//! }
//! ```
//! ```compile_fail,E0599
//! # use vmm_pool::{FromOffloaded, Shut, driver::Driver};
//! fn step<D: Driver>(is_away: Shut<D, FromOffloaded>) {
//!     let let_in = is_away.into_draining().step_all();
//! }
//! ```

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use super::draining::Draining;
use super::leaving::Undone;
use super::still::{Failed, Quiesced, ShutGate};
use crate::driver::{Driver, RawContext};
use crate::gate::{Mode, StillInside};
use crate::ledger::{Selection, Tags, Whose};
use crate::pool::{Pool, Right};

/// The right to begin a pause or resume. Each pool has one. The values that it becomes end with [`super::Done::end`],
/// which returns it. If one of them is dropped, the right goes back to the pool ([`Pool::keeper`]).
#[derive(Debug)]
#[must_use = "dropping it gives it back to the pool"]
pub struct Keeper<D: Driver> {
    pool: Arc<Pool<D>>,
    right: Arc<Right>,
}

/// The gate is shut, and no call of the application's is under way. `W` is the mode that the gate had before:
/// [`FromOpen`] or [`FromOffloaded`]. Dropping this puts the gate back to that mode.
#[derive(Debug)]
#[must_use = "dropping it puts the gate where it was"]
pub struct Shut<D: Driver, W: Origin> {
    gate: ShutGate<D>,
    from: PhantomData<W>,
}

/// The process ran: all memory is on its devices, except memory that is set aside.
#[derive(Debug)]
pub enum FromOpen {}

/// All memory was off its devices, and nothing has been launched since.
#[derive(Debug)]
pub enum FromOffloaded {}

/// A mode that the gate can have before: [`FromOpen`] or [`FromOffloaded`].
pub trait Origin: sealed::Sealed {
    /// The memory that a resume from this mode can restore.
    type Brings: Into<Selection>;
}

impl Origin for FromOpen {
    type Brings = Aside;
}

impl Origin for FromOffloaded {
    type Brings = Away;
}

mod sealed {
    pub trait Sealed {
        const IS_OPEN: bool;
    }
}

impl sealed::Sealed for FromOpen {
    const IS_OPEN: bool = true;
}

impl sealed::Sealed for FromOffloaded {
    const IS_OPEN: bool = false;
}

fn mode<W: sealed::Sealed>() -> Mode {
    if W::IS_OPEN { Mode::Open } else { Mode::Offloaded }
}

/// A resume by tag of a process that runs: memory of these tags and owners that is set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aside(pub Tags, pub Whose);

/// A resume of a process whose memory is off its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Away {
    /// Everything except memory that is set aside.
    Whole,
    /// The memory that belongs to no region, and these tags.
    Staged(Tags),
}

impl From<Aside> for Selection {
    fn from(Aside(tags, whose): Aside) -> Self {
        Self::SetAside(tags, whose)
    }
}

impl From<Away> for Selection {
    fn from(away: Away) -> Self {
        match away {
            Away::Whole => Self::Whole,
            Away::Staged(tags) => Self::Staged(tags),
        }
    }
}

/// The reason why the gate was not shut. The gate is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotShut {
    /// Calls did not come out in time.
    #[error(transparent)]
    StillInside(#[from] StillInside),
    /// The process is in another state than this step needs. Nothing was changed. `sublet pause` or `sublet resume`
    /// brings all processes to one state.
    #[error("the gate is not {0}")]
    Elsewhere(&'static str),
}

impl NotShut {
    fn elsewhere(wanted: Mode) -> Self {
        Self::Elsewhere(match wanted {
            Mode::Open => "open",
            Mode::Offloaded => "shut behind memory that is away",
            Mode::Shut => "shut",
        })
    }
}

impl<D: Driver> Pool<D> {
    /// Makes an empty pool, and the right to pause and resume it. `toucher_threads` is the number of threads that
    /// populate new host memory. With 0, the copies populate it, which is slow and uses no more host memory than they
    /// need. `own_contexts` lists the contexts that the application has created: a pause waits for their work too.
    pub fn new(
        driver: Arc<D>,
        toucher_threads: usize,
        own_contexts: fn() -> Vec<RawContext>,
    ) -> (Arc<Self>, Keeper<D>) {
        let (pool, right) = Self::with_right(driver, toucher_threads, own_contexts);
        let pool = Arc::new(pool);
        (Arc::clone(&pool), Keeper { pool, right })
    }

    /// Returns the right to begin a pause or resume, if nobody has it.
    pub fn keeper(self: &Arc<Self>) -> Option<Keeper<D>> {
        self.take_right().map(|right| Keeper { pool: Arc::clone(self), right })
    }
}

impl<D: Driver> Keeper<D> {
    pub(super) fn new(pool: Arc<Pool<D>>, right: Arc<Right>) -> Self {
        Self { pool, right }
    }

    pub(super) fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }

    pub(super) fn into_parts(self) -> (Arc<Pool<D>>, Arc<Right>) {
        (self.pool, self.right)
    }

    /// Shuts the gate of a process that runs, for a pause. Does not block.
    ///
    /// # Errors
    /// [`NotShut::Elsewhere`] if the process does not run.
    pub fn close(self) -> Result<Draining<D>, Failed<Self, NotShut>> {
        let before = self.pool.gate().close();
        if before != Mode::Open {
            self.pool.gate().set(before);
            return Err(Failed::new(self, NotShut::elsewhere(Mode::Open)));
        }
        Ok(Draining::new(self.into_gate(before)))
    }

    /// Shuts the gate for every call of the application's, and waits until those under way have ended. The calling
    /// thread must not be inside.
    ///
    /// # Errors
    /// [`NotShut::Elsewhere`] if the gate is not in the mode `W`; [`NotShut::StillInside`] at `deadline`, or once
    /// `called_off` returns true.
    pub fn shut<W: Origin>(
        self,
        deadline: Instant,
        called_off: impl Fn() -> bool,
    ) -> Result<Shut<D, W>, Failed<Self, NotShut>> {
        let wanted = mode::<W>();
        match self.pool.gate().shut(deadline, called_off) {
            Err(inside) => Err(Failed::new(self, inside.into())),
            Ok(before) if before != wanted => {
                self.pool.gate().set(before);
                Err(Failed::new(self, NotShut::elsewhere(wanted)))
            }
            Ok(before) => Ok(Shut { gate: self.into_gate(before), from: PhantomData }),
        }
    }

    /// Opens the gate for good, because the context of this process is lost, and its memory with it. The application
    /// gets the driver's errors, and ends. No pause or resume is possible any more.
    pub fn let_through_for_good(self) {
        let Self { pool, right } = self;
        let _leaked = ManuallyDrop::new(right);
        pool.gate().set(Mode::Open);
    }

    fn into_gate(self, before: Mode) -> ShutGate<D> {
        ShutGate::new(self.pool, self.right, before)
    }
}

impl<D: Driver, W: Origin> Shut<D, W> {
    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.gate.pool()
    }

    /// Gives up the pause or resume that was about to begin.
    pub fn reopen(self) -> Undone<D> {
        self.gate.reopen()
    }

    pub(super) fn into_gate(self) -> ShutGate<D> {
        self.gate
    }
}

impl<D: Driver> Shut<D, FromOffloaded> {
    /// Begins a pause of the rest. The devices are idle: nothing has been launched since the pause before drained them.
    pub fn into_quiesced(self) -> Quiesced<D> {
        Quiesced::of_idle(self.gate)
    }
}

impl<D: Driver> Shut<D, FromOpen> {
    /// Begins a pause. The devices may still have work.
    pub fn into_draining(self) -> Draining<D> {
        Draining::new(self.gate)
    }
}
