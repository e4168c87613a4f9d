//! How far the pause or resume under way has come, as the proof that its next step needs.
//!
//! The worker thread alone takes it: out for a step, and back with what the step has made of it. What the process is to
//! others meanwhile is its [`crate::state::MemberState`].

use vmm_pool::driver::Driver;
use vmm_pool::{Draining, Leaving, Prepared, Quiesced, Restored, Returning, Selection};

/// See the head of this module.
#[derive(Debug)]
pub(super) enum Progress<D: Driver> {
    /// Nothing is under way.
    Rest,
    /// The gate is shut for a pause of this memory, and the devices may be at work.
    Draining(Draining<D>, Selection),
    /// Its devices are drained.
    Quiesced(Quiesced<D>, Selection),
    /// Saving has failed half-way.
    Leaving(Leaving<D>),
    /// All that comes before the release is done.
    Prepared(Prepared<D>),
    /// This memory is released, and what stays is still to be told.
    Released(Selection),
    /// Memory is on its way back.
    Returning(Returning<D>),
    /// All that comes before the gate opens is done.
    Restored(Restored<D>),
}

impl<D: Driver> Progress<D> {
    /// Is going on as good as going back?
    pub(super) fn is_prepared(&self) -> bool {
        match self {
            Self::Prepared(_) | Self::Restored(_) => true,
            Self::Rest
            | Self::Draining(..)
            | Self::Quiesced(..)
            | Self::Leaving(_)
            | Self::Released(_)
            | Self::Returning(_) => false,
        }
    }

    /// The context is lost: what is under way is neither finished nor undone.
    pub(super) fn abandon(self) {
        match self {
            Self::Leaving(leaving) => leaving.abandon(),
            Self::Prepared(prepared) => prepared.abandon(),
            Self::Returning(returning) => returning.abandon(),
            Self::Restored(restored) => restored.abandon(),
            Self::Rest | Self::Draining(..) | Self::Quiesced(..) | Self::Released(_) => {}
        }
    }
}

/// What the next step needs, where that is the stage; the stage as it is, where it is another.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "every other stage is out of turn, also a new one"
)]
impl<D: Driver> Progress<D> {
    pub(super) fn into_draining(self) -> Result<(Draining<D>, Selection), Box<Self>> {
        match self {
            Self::Draining(draining, selection) => Ok((draining, selection)),
            other => Err(Box::new(other)),
        }
    }

    pub(super) fn into_quiesced(self) -> Result<(Quiesced<D>, Selection), Box<Self>> {
        match self {
            Self::Quiesced(quiesced, selection) => Ok((quiesced, selection)),
            other => Err(Box::new(other)),
        }
    }

    pub(super) fn into_prepared(self) -> Result<Prepared<D>, Box<Self>> {
        match self {
            Self::Prepared(prepared) => Ok(prepared),
            other => Err(Box::new(other)),
        }
    }

    pub(super) fn into_released(self) -> Result<Selection, Box<Self>> {
        match self {
            Self::Released(selection) => Ok(selection),
            other => Err(Box::new(other)),
        }
    }

    pub(super) fn into_returning(self) -> Result<Returning<D>, Box<Self>> {
        match self {
            Self::Returning(returning) => Ok(returning),
            other => Err(Box::new(other)),
        }
    }

    pub(super) fn into_restored(self) -> Result<Restored<D>, Box<Self>> {
        match self {
            Self::Restored(restored) => Ok(restored),
            other => Err(Box::new(other)),
        }
    }
}
