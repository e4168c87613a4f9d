//! The states of a process between active and paused.

use serde::{Deserialize, Serialize};

/// The state of a process, as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum MemberState {
    /// Running; memory on the device.
    Active,
    /// On the way to [`MemberState::Paused`].
    Offloading,
    /// Waiting at the gate; memory given back.
    Paused,
    /// The same, and nothing of it is on a device: its contexts are away too, or about to leave or to come. It calls the
    /// driver for nothing.
    Deep,
    /// On the way to [`MemberState::Active`].
    Restoring,
    /// Something was lost; the process should be ended.
    Faulted,
}

impl MemberState {
    /// Is the process stopped in a pause?
    pub fn is_away(self) -> bool {
        matches!(self, Self::Paused | Self::Deep)
    }

    /// Is the process on its way neither to a pause nor to a resume?
    pub fn rests(self) -> bool {
        match self {
            Self::Active | Self::Paused | Self::Deep | Self::Faulted => true,
            Self::Offloading | Self::Restoring => false,
        }
    }
}

/// Something that happened to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The gate was closed for a pause.
    PauseBegun,
    /// A pause was undone before anything was released.
    PauseUndone,
    /// A process that is stopped after a pause by tag began to pause the rest of its memory.
    RestBegun,
    /// The pause of the rest was undone, and the process is stopped as before.
    RestUndone,
    /// All own memory was released.
    Released,
    /// The gate was closed for a resume.
    ResumeBegun,
    /// A resume was undone: everything is released again, contents kept.
    ResumeUndone,
    /// All memory is restored.
    Resumed,
    /// The memory of some tags was released, and the process runs on.
    TagsReleased,
    /// The gate was closed to restore the memory of some tags.
    TagResumeBegun,
    /// The resume by tag was undone, and the process runs on without that memory.
    TagResumeUndone,
    /// The paused process was told that its contexts leave.
    Frozen,
    /// The contexts of the process are restored.
    Thawed,
    /// Something cannot be restored.
    Lost,
}

/// The process is in another state than this step needs. Its memory is unchanged. The next `sublet pause` or `sublet
/// resume` repairs the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} is not possible while {state:?}")]
pub struct InvalidTransition {
    /// The state of the process.
    pub state: MemberState,
    /// The event that was to happen.
    pub event: Event,
}

/// The state after `event`.
///
/// # Errors
/// [`InvalidTransition`] when the event does not fit `state`.
pub fn next(state: MemberState, event: Event) -> Result<MemberState, InvalidTransition> {
    use MemberState::{Active, Deep, Faulted, Offloading, Paused, Restoring};
    match (state, event) {
        (Active, Event::PauseBegun) | (Paused, Event::RestBegun) => Ok(Offloading),
        (Offloading, Event::PauseUndone | Event::TagsReleased)
        | (Restoring, Event::Resumed | Event::TagResumeUndone) => Ok(Active),
        (Offloading, Event::Released | Event::RestUndone)
        | (Restoring, Event::ResumeUndone)
        | (Deep, Event::Thawed) => Ok(Paused),
        (Paused, Event::Frozen) => Ok(Deep),
        (Paused, Event::ResumeBegun) | (Active, Event::TagResumeBegun) => Ok(Restoring),
        (_, Event::Lost) => Ok(Faulted),
        (
            Active | Offloading | Paused | Deep | Restoring | Faulted,
            Event::PauseBegun
            | Event::PauseUndone
            | Event::RestBegun
            | Event::RestUndone
            | Event::Released
            | Event::ResumeBegun
            | Event::ResumeUndone
            | Event::Resumed
            | Event::TagsReleased
            | Event::TagResumeBegun
            | Event::TagResumeUndone
            | Event::Frozen
            | Event::Thawed,
        ) => Err(InvalidTransition { state, event }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_drawn_transitions_exist() {
        use MemberState::{Active, Deep, Faulted, Offloading, Paused, Restoring};
        let events = [
            Event::PauseBegun,
            Event::PauseUndone,
            Event::RestBegun,
            Event::RestUndone,
            Event::Released,
            Event::ResumeBegun,
            Event::ResumeUndone,
            Event::Resumed,
            Event::TagsReleased,
            Event::TagResumeBegun,
            Event::TagResumeUndone,
            Event::Frozen,
            Event::Thawed,
        ];
        let allowed = [
            (Active, Event::PauseBegun, Offloading),
            (Offloading, Event::PauseUndone, Active),
            (Offloading, Event::Released, Paused),
            (Paused, Event::RestBegun, Offloading),
            (Offloading, Event::RestUndone, Paused),
            (Paused, Event::ResumeBegun, Restoring),
            (Restoring, Event::ResumeUndone, Paused),
            (Restoring, Event::Resumed, Active),
            (Offloading, Event::TagsReleased, Active),
            (Active, Event::TagResumeBegun, Restoring),
            (Restoring, Event::TagResumeUndone, Active),
            (Paused, Event::Frozen, Deep),
            (Deep, Event::Thawed, Paused),
        ];
        for state in [Active, Offloading, Paused, Deep, Restoring, Faulted] {
            for event in events {
                let expected = allowed.iter().find(|row| row.0 == state && row.1 == event);
                assert_eq!(
                    next(state, event).ok(),
                    expected.map(|row| row.2),
                    "{state:?} {event:?}"
                );
            }
            assert_eq!(next(state, Event::Lost), Ok(Faulted));
        }
    }
}
