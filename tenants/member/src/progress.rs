//! The progress of the pause or resume under way, as the proof that its next step needs.
//!
//! The worker thread alone takes it: out for a step, and back with what the step has made of it. What the process is to
//! others meanwhile is its [`sublet_protocol::state::MemberState`].

use vmm_pool::driver::Driver;
use vmm_pool::{
    Arriving, Departing, Draining, Frozen, Keeper, Leaving, Prepared, Quiesced, Restored,
    Returning, Selection,
};

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) enum Progress<D: Driver> {
    /// A step has it. What such a step drops gives the keeper back to the pool.
    #[default]
    Taken,
    /// Nothing is under way.
    Rest(Keeper<D>),
    /// The gate is shut for a pause of this memory, and the devices may be at work.
    Draining(Draining<D>, Selection),
    /// Its devices are drained.
    Quiesced(Quiesced<D>, Selection),
    /// Saving has failed half-way.
    Leaving(Leaving<D>),
    /// All that comes before the release is done.
    Prepared(Prepared<D>),
    /// Memory goes; this is the number of the next stage.
    Departing(Box<Departing<D>>, u32),
    /// This memory is released, and what stays is still to be told. Nothing else is under way.
    Released(Keeper<D>, Selection),
    /// The process's contexts are away, or about to leave or to come. Nothing else is under way, and no step can begin: there is nothing here to
    /// call the driver with.
    Frozen(Frozen<D>),
    /// Own memory comes back; this is the number of the next stage.
    Arriving(Arriving<D>, u32),
    /// Own memory is back, and imports follow.
    Returning(Returning<D>),
    /// All that comes before the gate opens is done.
    Restored(Restored<D>),
}

/// The end of a pause or resume whose coordinator is gone, as far as one process alone knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outlook {
    /// Nobody was told to commit: it has not prepared.
    Aborts,
    /// Going on is as good as going back; where it has begun to release, it was told to, and goes on.
    InDoubt,
}

impl<D: Driver> Progress<D> {
    pub(super) fn outlook(&self) -> Outlook {
        let is_in_doubt =
            matches!(self, Self::Prepared(_) | Self::Departing(..) | Self::Restored(_));
        if is_in_doubt { Outlook::InDoubt } else { Outlook::Aborts }
    }

    /// The context is lost: what is under way is neither finished nor undone.
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

/// Defines functions that return what a step needs, if the stage is the right one. Another stage is returned as it is.
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
    /// For whatever begins.
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
    /// For stage number `stage`, or for all that is left; with the number of the next stage. From here on there is no way back.
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
