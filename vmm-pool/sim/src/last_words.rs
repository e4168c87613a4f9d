//! Why a simulated device failed, in words: what touched which addresses, and the last calls that changed what is mapped there.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use super::core::Touch;
use super::stream::meet;
use sublet_driver::{DeviceOrdinal, VaRange};

/// The number of calls that are remembered.
const CALLS_MAX: usize = 512;
/// The number of calls that are told, of those that concern the addresses.
const TOLD_MAX: usize = 12;

#[derive(Debug)]
struct Call {
    number: u64,
    what: &'static str,
    range: VaRange,
    thread: String,
}

#[derive(Debug, Default)]
struct LastCalls {
    calls: VecDeque<Call>,
    made: u64,
    /// The access that was refused last, with its device and range: alone it ends no context.
    touched: Option<(Touch, DeviceOrdinal, VaRange)>,
    words: Option<String>,
}

impl LastCalls {
    fn tell(&self, words: &mut String, range: VaRange) {
        // Writing to a string does not fail.
        let _never = write!(words, "{range:?}, after {} calls", self.made);
        let about = self.calls.iter().rev().filter(|call| meet(call.range, range));
        for Call { number, what, range, thread } in about.take(TOLD_MAX) {
            let _never = write!(words, "; {number}: {what} {range:?} by {thread}");
        }
    }
}

/// See the head of this module. Its lock is a leaf.
#[derive(Debug, Default)]
pub(super) struct LastWords(Mutex<LastCalls>);

impl LastWords {
    /// A call has changed what is mapped in `range`.
    pub(super) fn note(&self, what: &'static str, range: VaRange) {
        let thread = thread::current().name().unwrap_or("unnamed").to_owned();
        let mut table = self.table();
        table.made += 1;
        let number = table.made;
        if table.calls.len() == CALLS_MAX {
            table.calls.pop_front();
        }
        table.calls.push_back(Call { number, what, range, thread });
    }

    /// An address is not there, which may be just what the caller wanted to know.
    pub(super) fn refused(&self, touch: Touch, device: DeviceOrdinal, range: VaRange) {
        self.table().touched = Some((touch, device, range));
    }

    /// A context ends over `range`. The first of these is kept, with what was refused last.
    pub(super) fn ended(&self, range: VaRange, what: impl FnOnce() -> String) {
        if self.table().words.is_some() {
            return;
        }
        // It takes other locks.
        let mut words = what() + ": ";
        let mut table = self.table();
        table.tell(&mut words, range);
        if let Some((touch, device, range)) = table.touched {
            let _never =
                write!(words, "; before it {touch:?} by device {} was refused: ", device.0);
            table.tell(&mut words, range);
        }
        table.words.get_or_insert(words);
    }

    /// Returns the description of what the first context ended over.
    pub(super) fn told(&self) -> Option<String> {
        self.table().words.clone()
    }

    fn table(&self) -> MutexGuard<'_, LastCalls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
