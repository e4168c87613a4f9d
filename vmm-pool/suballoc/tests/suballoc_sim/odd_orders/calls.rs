//! Calls in orders that no library has.

use proptest::prelude::*;

/// A call of one of two processes; numbers pick among what exists.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Create {
        device: bool,
        units: u64,
    },
    Reserve {
        units: u64,
    },
    Map {
        handle: usize,
        place: usize,
        fits: bool,
        at: u64,
        wrong: Wrong,
    },
    Access {
        place: usize,
        at: u64,
        units: u64,
        device: bool,
        flags: i32,
    },
    Unmap {
        place: usize,
        at: u64,
        units: u64,
    },
    Free {
        place: usize,
    },
    Release {
        handle: usize,
    },
    Retain {
        place: usize,
        at: u64,
    },
    Export {
        handle: usize,
    },
    Import {
        ticket: usize,
    },
    Ask {
        handle: usize,
    },
    Write {
        place: usize,
        at: u64,
        device: bool,
    },
    /// The usual calls of a library: create, reserve, map, give access, write.
    Usual {
        device: bool,
        units: u64,
    },
    PauseOrResume,
}

/// The error in a mapping.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wrong {
    Nothing,
    Offset,
    Longer,
    Shorter,
}

pub(super) fn any_call() -> impl Strategy<Value = (bool, Call)> {
    let pick = any::<usize>;
    let units = || 1..4_u64;
    // Most calls begin at the start of a place, and most are right.
    let at = || prop_oneof![4 => Just(0_u64), 1 => 1..3_u64];
    let wrong = prop_oneof![
        12 => Just(Wrong::Nothing),
        1 => Just(Wrong::Offset),
        1 => Just(Wrong::Longer),
        1 => Just(Wrong::Shorter),
    ];
    let call = prop_oneof![
        6 => (prop::bool::weighted(0.2), units())
            .prop_map(|(device, units)| Call::Create { device, units }),
        6 => prop_oneof![5 => units(), 1 => 4..8_u64].prop_map(|units| Call::Reserve { units }),
        12 => (pick(), pick(), prop::bool::weighted(0.8), at(), wrong)
            .prop_map(|(handle, place, fits, at, wrong)| Call::Map { handle, place, fits, at, wrong }),
        5 => (pick(), at(), 0..4_u64, prop::bool::weighted(0.3), prop::sample::select(&[3, 3, 3, 1, 0, 2][..]))
            .prop_map(|(place, at, units, device, flags)| Call::Access { place, at, units, device, flags }),
        5 => (pick(), at(), 0..4_u64).prop_map(|(place, at, units)| Call::Unmap { place, at, units }),
        3 => pick().prop_map(|place| Call::Free { place }),
        4 => pick().prop_map(|handle| Call::Release { handle }),
        2 => (pick(), at()).prop_map(|(place, at)| Call::Retain { place, at }),
        3 => pick().prop_map(|handle| Call::Export { handle }),
        3 => pick().prop_map(|ticket| Call::Import { ticket }),
        2 => pick().prop_map(|handle| Call::Ask { handle }),
        6 => (pick(), at(), any::<bool>()).prop_map(|(place, at, device)| Call::Write { place, at, device }),
        6 => (prop::bool::weighted(0.2), units())
            .prop_map(|(device, units)| Call::Usual { device, units }),
        3 => Just(Call::PauseOrResume),
    ];
    (prop::bool::weighted(0.3), call)
}
