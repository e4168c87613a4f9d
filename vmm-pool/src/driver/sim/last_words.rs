//! Why a simulated device failed, in words: what touched which addresses, and the last calls that changed what is mapped there.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use super::stream::meet;
use crate::driver::VaRange;

/// How many calls are remembered.
const CALLS_MAX: usize = 512;
/// How many of those that concern the addresses are told.
const TOLD_MAX: usize = 12;

#[derive(Debug)]
struct Call {
    number: u64,
    what: &'static str,
    range: VaRange,
    thread: String,
}

#[derive(Debug, Default)]
struct Table {
    calls: VecDeque<Call>,
    made: u64,
    words: Option<String>,
}

/// See the head of this module. Its lock is a leaf.
#[derive(Debug, Default)]
pub(super) struct LastWords(Mutex<Table>);

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

    /// Something that touched `range` was refused, or uses what goes. The first of these is kept.
    pub(super) fn refused(&self, range: VaRange, what: impl FnOnce() -> String) {
        // A test may ask again and again for an address that is not there yet.
        if self.table().words.is_some() {
            return;
        }
        let what = what();
        let mut table = self.table();
        if table.words.is_some() {
            return;
        }
        let mut words = format!("{what}: {range:?}, after {} calls", table.made);
        let about = table.calls.iter().rev().filter(|call| meet(call.range, range));
        for Call { number, what, range, thread } in about.take(TOLD_MAX) {
            // Writing to a string does not fail.
            let _never = write!(words, "; {number}: {what} {range:?} by {thread}");
        }
        table.words = Some(words);
    }

    /// What the first refusal was about.
    pub(super) fn told(&self) -> Option<String> {
        self.table().words.clone()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
