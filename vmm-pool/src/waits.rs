//! Waiting for devices, on threads of their own: a wait inside the driver cannot be called off. One that is not over when
//! nobody wants it any more goes on, and serves the next waiter for the same place, so there is never more than
//! one thread a place.
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
    /// A context that the application made for itself.
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

/// Does `code` say that the application has ended this context of its own? It may have done so by a call that nobody saw.
fn is_over(place: Waited, code: DriverCode) -> bool {
    let codes = [DriverCode::INVALID_CONTEXT, DriverCode::CONTEXT_IS_DESTROYED];
    matches!(place, Waited::OwnContext(_)) && codes.contains(&code)
}

/// The waits of one process. Any thread may use it.
#[derive(Debug)]
pub struct Waits<D: Driver> {
    shared: Arc<WaitThreads<D>>,
    /// Something has been waited for.
    ended: Receiver<()>,
}

#[derive(Debug)]
struct WaitThreads<D: Driver> {
    driver: Arc<D>,
    table: Mutex<WaitPlaces>,
    tell: Sender<()>,
    /// A wait is over.
    over: Condvar,
}

#[derive(Debug, Default)]
struct WaitPlaces {
    /// The last question of all. No number comes twice.
    last: u64,
    places: BTreeMap<Waited, WaitPlace>,
}

/// One place that was asked about.
#[derive(Debug, Default)]
struct WaitPlace {
    /// The last question.
    asked: u64,
    /// The last question that was answered.
    answered: u64,
    outcome: Option<DriverError>,
    has_thread: bool,
    /// Since when its thread is in the driver, or about to be.
    began: Option<Instant>,
}

impl WaitPlace {
    /// Is a wait to begin here?
    fn is_wanted(&self) -> bool {
        self.asked > self.answered
    }
}

/// One question about several places: has all work that was there when it was asked ended?
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
        // One message says that there is something to look at; more would say the same.
        let (tell, ended) = crossbeam_channel::bounded(1);
        let shared = WaitThreads { driver, table: Mutex::default(), tell, over: Condvar::new() };
        Self { shared: Arc::new(shared), ended }
    }

    /// Has waits end at `places` for all work that is there now.
    ///
    /// # Errors
    /// The system gave no thread for this place.
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
            // It takes the lock first, which is given up below.
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

    /// Gets a message when a wait has ended.
    pub(crate) fn ended(&self) -> &Receiver<()> {
        &self.ended
    }

    /// Waits until no wait is under way that was taken up less than `limit` ago, which is over then at the latest. Is none at all?
    ///
    /// For a thread that is inside, and about to begin a stream capture, which the driver ends when a device is waited for during it: waits that were
    /// left behind when the gate opened may be about to begin, though nobody wants to know any more. Where a device has work for longer, its wait
    /// has begun long before.
    pub fn let_end(&self, limit: Duration) -> bool {
        let is_young = |row: &WaitPlace| row.began.is_some_and(|began| began.elapsed() < limit);
        let is_any = |table: &mut WaitPlaces| table.places.values().any(is_young);
        let waited = self.shared.over.wait_timeout_while(lock(&self.shared.table), limit, is_any);
        let (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        table.places.values().all(|row| row.began.is_none())
    }

    /// Waits until nobody of ours is in the driver at `place`, or about to be, for at most `limit`. Is nobody? Nobody may ask for it meanwhile.
    ///
    /// For a thread that is inside, and about to end a context, which nobody may be using: a wait there that was left behind when the gate opened
    /// ends with the work, which the driver would wait for too.
    #[doc(alias = "cuCtxDestroy")]
    pub fn let_place_end(&self, place: Waited, limit: Duration) -> bool {
        let is_there = |table: &mut WaitPlaces| {
            table.places.get(&place).is_some_and(|row| row.began.is_some() || row.is_wanted())
        };
        let waited = self.shared.over.wait_timeout_while(lock(&self.shared.table), limit, is_there);
        let (mut table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_there(&mut table)
    }

    /// Nobody wants to know any more. No wait is taken up after this: one during a stream capture would end that.
    pub(crate) fn forget(&self) {
        for row in lock(&self.shared.table).places.values_mut() {
            row.asked = row.answered;
        }
        self.shared.over.notify_all();
    }
}

impl<D: Driver> WaitThreads<D> {
    /// The thread of `place` is no more. What was asked has failed, and the next question begins another.
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

    /// Waits for `place` as long as somebody wants to know.
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
            // One that has ended has no work left.
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
