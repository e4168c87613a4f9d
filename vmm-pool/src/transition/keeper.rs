//! The right to begin a pause or resume: one at a time, from the mode that the gate is in.
//!
//! [`Pool::new`] hands out the one [`Keeper`]. Each beginning consumes it, so there is no second one until the first has
//! ended:
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
//! A process that runs has no memory to create but what is set aside; one whose memory is away has all of it:
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
//! Calls that use memory are let in only where all memory is there:
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

/// The right to begin a pause or resume. There is one a pool. What it becomes ends with [`super::Done::end`], which is it
/// again; whatever is dropped on the way gives it back to the pool ([`Pool::keeper`]).
#[derive(Debug)]
#[must_use = "dropping it gives it back to the pool"]
pub struct Keeper<D: Driver> {
    pool: Arc<Pool<D>>,
    right: Arc<Right>,
}

/// The gate is shut, and no call of the application's is under way. `W` says where the gate was: [`FromOpen`] or
/// [`FromOffloaded`]. Dropping it puts the gate back there.
#[derive(Debug)]
#[must_use = "dropping it puts the gate where it was"]
pub struct Shut<D: Driver, W: Origin> {
    gate: ShutGate<D>,
    from: PhantomData<W>,
}

/// The process ran: all memory is there that is not set aside.
#[derive(Debug)]
pub enum FromOpen {}

/// All memory was away, and nothing has been launched since.
#[derive(Debug)]
pub enum FromOffloaded {}

/// [`FromOpen`] or [`FromOffloaded`].
pub trait Origin: sealed::Sealed {
    /// The memory that a resume from there can bring back.
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

/// A resume by tag of a process that runs: what is set aside of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aside(pub Tags, pub Whose);

/// A resume of a process whose memory is away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Away {
    /// Everything but what is set aside.
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

/// Why the gate was not shut. It is as it was.
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
    /// An empty pool, and the right to pause and resume it. `toucher_threads` is how many threads bring new host memory in;
    /// with none it comes in as contents are copied there, which is slow, and takes no more than they need. `own_contexts`
    /// lists the contexts that the application has made for itself: a pause waits for their work too.
    pub fn new(
        driver: Arc<D>,
        toucher_threads: usize,
        own_contexts: fn() -> Vec<RawContext>,
    ) -> (Arc<Self>, Keeper<D>) {
        let (pool, right) = Self::with_right(driver, toucher_threads, own_contexts);
        let pool = Arc::new(pool);
        (Arc::clone(&pool), Keeper { pool, right })
    }

    /// The right to begin a pause or resume, if nobody has it.
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

    /// Shuts the gate of a process that runs for a pause, and waits for nobody.
    ///
    /// # Errors
    /// [`NotShut::Elsewhere`] if it does not run.
    pub fn close(self) -> Result<Draining<D>, Failed<Self, NotShut>> {
        let before = self.pool.gate().close();
        if before != Mode::Open {
            self.pool.gate().set(before);
            return Err(Failed::new(self, NotShut::elsewhere(Mode::Open)));
        }
        Ok(Draining::new(self.into_gate(before)))
    }

    /// Shuts the gate for every call of the application's, and waits until those under way are out. The calling thread
    /// must not be inside.
    ///
    /// # Errors
    /// [`NotShut::Elsewhere`] if the gate is not where `W` says; [`NotShut::StillInside`] at `deadline`, or when
    /// `called_off` says so.
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

    /// The context of this process is lost, and its memory with it: lets every call through, so that the application
    /// hears of it from the driver, and ends. There is no way back from that, and no pause or resume any more.
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
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.gate.pool()
    }

    /// Gives up the pause or resume that was to begin.
    pub fn reopen(self) -> Undone<D> {
        self.gate.reopen()
    }

    pub(super) fn into_gate(self) -> ShutGate<D> {
        self.gate
    }
}

impl<D: Driver> Shut<D, FromOffloaded> {
    /// For a pause of the rest: nothing has been launched since the pause before it drained the devices.
    pub fn into_quiesced(self) -> Quiesced<D> {
        Quiesced::of_idle(self.gate)
    }
}

impl<D: Driver> Shut<D, FromOpen> {
    /// For a pause: the devices may be at work.
    pub fn into_draining(self) -> Draining<D> {
        Draining::new(self.gate)
    }
}
