//! Describes why a simulated device failed: the access and its addresses, and the last calls that changed the mappings there.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use super::core::Touch;
use super::stream::meet;
use sublet_driver::{DeviceOrdinal, VaRange};

/// The number of calls that are remembered.
const CALLS_MAX: usize = 512;
/// The most calls about the addresses that the description lists.
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
    /// The last access that was refused, with its device and range. A refusal alone ends no context.
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
    /// Records a call that has changed the mappings in `range`.
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

    /// Records a refused access to an address that is not mapped. The caller may have wanted just that answer.
    pub(super) fn refused(&self, touch: Touch, device: DeviceOrdinal, range: VaRange) {
        self.table().touched = Some((touch, device, range));
    }

    /// Records that an access to `range` ends a context. Only the first such record is kept, with the last refused access.
    pub(super) fn ended(&self, range: VaRange, what: impl FnOnce() -> String) {
        if self.table().words.is_some() {
            return;
        }
        // `what` takes other locks.
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

    /// Returns the description of the first end of a context.
    pub(super) fn told(&self) -> Option<String> {
        self.table().words.clone()
    }

    fn table(&self) -> MutexGuard<'_, LastCalls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
