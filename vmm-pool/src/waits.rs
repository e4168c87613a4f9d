//! Waits for devices, on separate threads, because nothing can cancel a wait inside the driver. A wait that nobody
//! needs any more goes on, and serves the next caller that waits for the same place. So there is never more than one
//! thread for a place.
//!
//! Lock order: `table` is a leaf, and never held across a driver call.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use crate::driver::{DeviceOrdinal, Driver, DriverCode, DriverError, DriverOp, RawContext};
use sublet_sync::sync::lock;

/// Something whose work must end before memory can leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waited {
    /// The primary context of a device.
    Device(DeviceOrdinal),
    /// A context that the application has created.
    OwnContext(RawContext),
}

impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => device.fmt(f),
            Self::OwnContext(context) => write!(f, "context {:#x}", context.0),
        }
    }
}

/// Does `code` say that the application has destroyed this context of its own? It may have done so by a call that
/// Sublet did not see.
fn is_over(place: Waited, code: DriverCode) -> bool {
    let codes = [DriverCode::INVALID_CONTEXT, DriverCode::CONTEXT_IS_DESTROYED];
    matches!(place, Waited::OwnContext(_)) && codes.contains(&code)
}

/// The waits of one process. Any thread may use this value.
#[derive(Debug)]
pub struct Waits<D: Driver> {
    shared: Arc<WaitThreads<D>>,
    /// The channel that gets a message when a wait has ended.
    ended: Receiver<()>,
}

#[derive(Debug)]
struct WaitThreads<D: Driver> {
    driver: Arc<D>,
    table: Mutex<WaitPlaces>,
    tell: Sender<()>,
    /// Signals that a wait is over.
    over: Condvar,
}

#[derive(Debug, Default)]
struct WaitPlaces {
    /// The number of the last question. Each question has a new number.
    last: u64,
    places: BTreeMap<Waited, WaitPlace>,
}

/// The state of one place that a question has named.
#[derive(Debug, Default)]
struct WaitPlace {
    /// The last question about the place.
    asked: u64,
    /// The last question about the place that was answered.
    answered: u64,
    outcome: Option<DriverError>,
    has_thread: bool,
    /// The time when the thread of the place entered the driver, or was about to.
    began: Option<Instant>,
}

impl WaitPlace {
    /// Must a wait begin here?
    fn is_wanted(&self) -> bool {
        self.asked > self.answered
    }
}

/// A question about several places: has all work ended that was there when the question was made?
#[derive(Debug)]
pub(crate) struct Question {
    number: u64,
    places: Vec<Waited>,
}

/// The answer to a question, as far as it is known.
#[derive(Debug)]
pub(crate) enum WorkLeft {
    /// All work has ended.
    Idle,
    /// These places have work left.
    Busy(Vec<Waited>),
    /// The driver refused to wait, or work has failed.
    Failed(Waited, DriverError),
}

impl<D: Driver> Waits<D> {
    pub(crate) fn new(driver: Arc<D>) -> Self {
        // One message says that an answer may be ready. More messages would say the same.
        let (tell, ended) = crossbeam_channel::bounded(1);
        let shared = WaitThreads { driver, table: Mutex::default(), tell, over: Condvar::new() };
        Self { shared: Arc::new(shared), ended }
    }

    /// Starts waits at `places` for all work that is there now.
    ///
    /// # Errors
    /// The system could not start a thread for this place.
    pub(crate) fn ask(&self, places: Vec<Waited>) -> Result<Question, (Waited, std::io::Error)> {
        let mut table = lock(&self.shared.table);
        table.last += 1;
        let number = table.last;
        for &place in &places {
            let row = table.places.entry(place).or_default();
            row.asked = number;
            if row.has_thread {
                continue;
            }
            let (shared, told) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
            let wait = move || shared.wait_for(place);
            // The thread first waits for the lock, which this function holds.
            sublet_sync::threads::spawn("sublet-drain", wait, move |_| told.end_in_panic(place))
                .map_err(|source| (place, source))?;
            row.has_thread = true;
        }
        Ok(Question { number, places })
    }

    /// Returns the answer to `question` so far.
    pub(crate) fn look(&self, question: &Question) -> WorkLeft {
        let table = lock(&self.shared.table);
        let mut busy = Vec::new();
        for &place in &question.places {
            match table.places.get(&place) {
                Some(row) if row.answered >= question.number => {
                    if let Some(error) = row.outcome {
                        return WorkLeft::Failed(place, error);
                    }
                }
                Some(_) | None => busy.push(place),
            }
        }
        if busy.is_empty() { WorkLeft::Idle } else { WorkLeft::Busy(busy) }
    }

    /// Returns the channel that gets a message when a wait has ended.
    pub(crate) fn ended(&self) -> &Receiver<()> {
        &self.ended
    }

    /// Waits until every wait has ended, or has run for `limit`, so for at most `limit`. Returns whether no wait is
    /// left.
    ///
    /// Call it on a thread that is inside and about to begin a stream capture. A wait for a device during a capture
    /// makes the driver end the capture. Waits that nobody needs any more may still enter the driver after the gate has
    /// opened. A wait for a device with long work has entered the driver long before.
    pub fn let_end(&self, limit: Duration) -> bool {
        let is_young = |row: &WaitPlace| row.began.is_some_and(|began| began.elapsed() < limit);
        let is_any = |table: &mut WaitPlaces| table.places.values().any(is_young);
        let waited = self.shared.over.wait_timeout_while(lock(&self.shared.table), limit, is_any);
        let (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        table.places.values().all(|row| row.began.is_none())
    }

    /// Waits until no thread of Sublet's waits in the driver at `place`, or is about to, for at most `limit`. Returns
    /// whether that is so. No new question may name the place meanwhile.
    ///
    /// Call it on a thread that is inside and about to destroy a context, which nobody may use then. A wait that was
    /// left there when the gate opened ends with the work. The driver would wait for that work too.
    #[doc(alias = "cuCtxDestroy")]
    pub fn let_place_end(&self, place: Waited, limit: Duration) -> bool {
        let is_there = |table: &mut WaitPlaces| {
            table.places.get(&place).is_some_and(|row| row.began.is_some() || row.is_wanted())
        };
        let waited = self.shared.over.wait_timeout_while(lock(&self.shared.table), limit, is_there);
        let (mut table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_there(&mut table)
    }

    /// Drops all open questions. No wait begins after this call: one during a stream capture would end the capture.
    pub(crate) fn forget(&self) {
        for row in lock(&self.shared.table).places.values_mut() {
            row.asked = row.answered;
        }
        self.shared.over.notify_all();
    }
}

impl<D: Driver> WaitThreads<D> {
    /// Records that the thread of `place` has ended. All its questions have failed, and the next question begins
    /// another thread.
    fn end_in_panic(&self, place: Waited) {
        let error = DriverError { op: DriverOp::ContextSynchronize, code: DriverCode::UNKNOWN };
        let mut table = lock(&self.table);
        let row = table.places.entry(place).or_default();
        let asked = row.asked;
        *row = WaitPlace { asked, answered: asked, outcome: Some(error), ..WaitPlace::default() };
        drop(table);
        self.over.notify_all();
        let _told = self.tell.try_send(());
    }

    /// Waits for `place` as long as a question is open.
    fn wait_for(&self, place: Waited) {
        loop {
            let number = {
                let mut table = lock(&self.table);
                let row = table.places.entry(place).or_default();
                if !row.is_wanted() {
                    row.has_thread = false;
                    return;
                }
                row.began = Some(Instant::now());
                row.asked
            };
            let current = match place {
                Waited::Device(device) => self.driver.make_current(device),
                Waited::OwnContext(context) => self.driver.make_own_context_current(context),
            };
            let outcome = current.and_then(|()| self.driver.synchronize()).err();
            // A context that is destroyed has no work left.
            let outcome = outcome.filter(|error| !is_over(place, error.code));
            {
                let mut table = lock(&self.table);
                let row = table.places.entry(place).or_default();
                row.began = None;
                row.answered = number;
                row.asked = row.asked.max(number);
                row.outcome = outcome;
            }
            self.over.notify_all();
            let _told = self.tell.try_send(());
        }
    }
}
