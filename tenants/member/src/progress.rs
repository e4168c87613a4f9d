//! The progress of the pause or resume under way. It is the proof that the next step needs.
//!
//! Only the worker thread uses it: a step takes it out, and puts back the result. Meanwhile other processes see the
//! [`sublet_protocol::state::MemberState`] of this process.

use vmm_pool::driver::Driver;
use vmm_pool::{
    Arriving, Departing, Draining, Frozen, Keeper, Leaving, Prepared, Quiesced, Restored,
    Returning, Selection,
};

/// The progress: see the head of this module.
#[derive(Debug, Default)]
pub(super) enum Progress<D: Driver> {
    /// A step has the progress. If the step drops it, the keeper returns to the pool.
    #[default]
    Taken,
    /// No action is under way.
    Rest(Keeper<D>),
    /// The gate is closed for a pause of this memory, and the devices may be at work.
    Draining(Draining<D>, Selection),
    /// The devices are drained.
    Quiesced(Quiesced<D>, Selection),
    /// Saving has failed half-way.
    Leaving(Leaving<D>),
    /// All steps before the release are done.
    Prepared(Prepared<D>),
    /// Memory is being released; this is the number of the next stage.
    Departing(Box<Departing<D>>, u32),
    /// This memory is released, and the report of staying memory is still due. No other action is under way.
    Released(Keeper<D>, Selection),
    /// The process's contexts are off the devices, or about to leave or to be restored. No other action is under way, and no
    /// step can begin: this state has nothing to call the driver with.
    Frozen(Frozen<D>),
    /// Own memory is being restored; this is the number of the next stage.
    Arriving(Arriving<D>, u32),
    /// Own memory is restored, and imports follow.
    Returning(Returning<D>),
    /// All steps before the gate opens are done.
    Restored(Restored<D>),
}

/// The end of a pause or resume whose coordinator has ended, as far as one process alone knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outlook {
    /// Abort: this process has not prepared, so no process was told to commit.
    Aborts,
    /// The process can go on as well as go back. If it has begun to release, it was told to, and goes on.
    InDoubt,
}

impl<D: Driver> Progress<D> {
    pub(super) fn outlook(&self) -> Outlook {
        let is_in_doubt =
            matches!(self, Self::Prepared(_) | Self::Departing(..) | Self::Restored(_));
        if is_in_doubt { Outlook::InDoubt } else { Outlook::Aborts }
    }

    /// Gives up the action under way after the loss of the context: it is neither finished nor undone.
    pub(super) fn abandon(self) {
        match self {
            Self::Leaving(leaving) => leaving.abandon(),
            Self::Prepared(prepared) => prepared.abandon(),
            Self::Departing(departing, _) => departing.abandon(),
            Self::Arriving(arriving, _) => arriving.abandon(),
            Self::Returning(returning) => returning.abandon(),
            Self::Restored(restored) => restored.abandon(),
            Self::Taken
            | Self::Rest(_)
            | Self::Draining(..)
            | Self::Quiesced(..)
            | Self::Frozen(_)
            | Self::Released(..) => {}
        }
    }
}

/// Defines functions that return the values of a stage, if the progress is at that stage. Otherwise they return the progress as
/// it is.
macro_rules! into {
    ($($(#[$doc:meta])* $name:ident: $stage:pat => $needs:expr => $what:ty;)*) => {
        impl<D: Driver> Progress<D> {$(
            $(#[$doc])*
            pub(super) fn $name(self) -> Result<$what, Box<Self>> {
                match self {
                    $stage => Ok($needs),
                    other => Err(Box::new(other)),
                }
            }
        )*}
    };
}

into! {
    into_draining: Self::Draining(step, memory) => (step, memory) => (Draining<D>, Selection);
    into_quiesced: Self::Quiesced(step, memory) => (step, memory) => (Quiesced<D>, Selection);
    /// The keeper, for any action that begins.
    into_keeper: Self::Rest(step) | Self::Released(step, _) => step => Keeper<D>;
    into_frozen: Self::Frozen(step) => step => Frozen<D>;
    into_released: Self::Released(step, memory) => (step, memory) => (Keeper<D>, Selection);
    into_arriving: Self::Arriving(step, next) => (step, next) => (Arriving<D>, u32);
    into_returning: Self::Returning(step) => step => Returning<D>;
    into_restored: Self::Restored(step) => step => Restored<D>;
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "every other stage is out of turn, also a new one"
)]
impl<D: Driver> Progress<D> {
    /// For stage number `stage`, or for all that is left; with the number of the next stage. After this the pause cannot be
    /// undone.
    pub(super) fn into_departing(
        self,
        stage: Option<u32>,
    ) -> Result<(Box<Departing<D>>, u32), Box<Self>> {
        match self {
            Self::Prepared(prepared) if stage.unwrap_or(0) == 0 => {
                Ok((Box::new(prepared.depart()), 0))
            }
            Self::Departing(departing, next) if stage.unwrap_or(next) == next => {
                Ok((departing, next))
            }
            other => Err(Box::new(other)),
        }
    }
}
