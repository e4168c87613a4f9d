//! Fault injection, held calls, call counters and latency. Calls are named as the driver names them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use sublet_driver::{DriverCode, DriverOp};

/// The matching calls that a fault rule makes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultSpan {
    /// Only the nth matching call, counted from 1 since the rule was added.
    Nth(u64),
    /// The nth matching call, and all later ones.
    From(u64),
}

#[derive(Debug)]
struct Rule {
    /// The driver's name of the call. `None` counts calls of every operation.
    symbol: Option<String>,
    span: FaultSpan,
    code: DriverCode,
    seen: u64,
}

/// A hold on the next call of one operation: the call waits, before it does anything, until this is dropped.
#[derive(Debug)]
pub struct Hold {
    met: Receiver<()>,
    _go: Sender<()>,
}

impl Hold {
    /// Waits until a thread has made the call. False if none has within `limit`.
    pub fn is_met(&self, limit: Duration) -> bool {
        self.met.recv_timeout(limit).is_ok()
    }
}

/// The call's side of a [`Hold`].
#[derive(Debug)]
struct Holder {
    symbol: &'static str,
    met: Sender<()>,
    go: Receiver<()>,
}

#[derive(Debug, Default)]
struct PlannedFaults {
    rules: Vec<Rule>,
    holders: Vec<Holder>,
    panics: Vec<&'static str>,
    calls: BTreeMap<&'static str, u64>,
    fired: u64,
}

/// Rules that make calls fail, and a count of the calls made. All methods may be called at any time.
#[derive(Debug, Default)]
pub struct Faults {
    table: Mutex<PlannedFaults>,
}

impl Faults {
    /// Fails calls of `op` in `span` with `code`, counted from now.
    pub fn fail(&self, op: DriverOp, span: FaultSpan, code: DriverCode) {
        self.add(Some(op.symbol().to_owned()), span, code);
    }

    /// Fails calls in `span` with `code`, counting calls of every operation from now.
    pub fn fail_any(&self, span: FaultSpan, code: DriverCode) {
        self.add(None, span, code);
    }

    /// Adds rules written as `symbol:nth:code`, separated by commas. `*` stands for every call. A `+` after the number means
    /// that call and all later ones: `cuMemCreate:3:2,*:10+:999`.
    ///
    /// # Errors
    /// The first rule that could not be read; rules before it have been added.
    pub fn parse(&self, rules: &str) -> Result<(), String> {
        for rule in rules.split(',').map(str::trim).filter(|r| !r.is_empty()) {
            let (symbol, span, code) = parse_rule(rule).ok_or_else(|| rule.to_owned())?;
            self.add(symbol, span, code);
        }
        Ok(())
    }

    /// Makes the next call of `op` panic, on whichever thread it is made.
    pub fn panic_at(&self, op: DriverOp) {
        self.lock().panics.push(op.symbol());
    }

    /// Holds the next call of `op` while the returned value lives.
    #[must_use]
    pub fn hold(&self, op: DriverOp) -> Hold {
        let ((met, is_met), (go, goes)) = (bounded(1), bounded(0));
        self.lock().holders.push(Holder { symbol: op.symbol(), met, go: goes });
        Hold { met: is_met, _go: go }
    }

    /// Removes all rules; counters stay.
    pub fn clear(&self) {
        self.lock().rules.clear();
    }

    /// Counts the calls that were made to fail so far.
    pub fn fired(&self) -> u64 {
        self.lock().fired
    }

    /// Counts the calls of `op`, failures included.
    pub fn calls(&self, op: DriverOp) -> u64 {
        self.calls_of(op.symbol())
    }

    /// Counts the calls named `symbol`, failures included.
    pub fn calls_of(&self, symbol: &str) -> u64 {
        self.lock().calls.get(symbol).copied().unwrap_or(0)
    }

    /// Counts all calls, failures included.
    pub fn calls_total(&self) -> u64 {
        self.lock().calls.values().sum()
    }

    fn add(&self, symbol: Option<String>, span: FaultSpan, code: DriverCode) {
        self.lock().rules.push(Rule { symbol, span, code, seen: 0 });
    }

    /// Counts a call, waits if it is held, and fails if a rule says so.
    pub(super) fn check(&self, symbol: &'static str) -> Result<(), DriverCode> {
        let holder = {
            let mut table = self.lock();
            let held = table.holders.iter().position(|holder| holder.symbol == symbol);
            held.map(|held| table.holders.remove(held))
        };
        if let Some(Holder { met, go, .. }) = holder {
            let _told = met.send(());
            // Nothing is ever sent: the wait ends when the other side is dropped.
            let _over = go.recv();
        }
        let mut table = self.lock();
        *table.calls.entry(symbol).or_default() += 1;
        if let Some(at) = table.panics.iter().position(|panics| *panics == symbol) {
            table.panics.remove(at);
            drop(table);
            panic!("{symbol} panics, as it was told to");
        }
        let mut verdict = Ok(());
        for rule in &mut table.rules {
            if rule.symbol.as_deref().is_some_and(|name| name != symbol) {
                continue;
            }
            rule.seen += 1;
            let hit = match rule.span {
                FaultSpan::Nth(nth) => rule.seen == nth,
                FaultSpan::From(nth) => rule.seen >= nth,
            };
            if hit && verdict.is_ok() {
                verdict = Err(rule.code);
            }
        }
        if verdict.is_err() {
            table.fired += 1;
        }
        verdict
    }

    fn lock(&self) -> MutexGuard<'_, PlannedFaults> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse_rule(rule: &str) -> Option<(Option<String>, FaultSpan, DriverCode)> {
    let mut words = rule.split(':');
    let symbol = match words.next()?.trim() {
        "*" => None,
        name => Some(name.to_owned()),
    };
    let nth = words.next()?.trim();
    let span = match nth.strip_suffix('+') {
        Some(number) => FaultSpan::From(number.parse().ok()?),
        None => FaultSpan::Nth(nth.parse().ok()?),
    };
    let code = DriverCode(words.next()?.trim().parse().ok()?);
    words.next().is_none().then_some((symbol, span, code))
}

/// The least time that each call takes. The default is zero.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    per_call: BTreeMap<String, Duration>,
}

impl Latency {
    /// Makes every call of `op` take at least `microseconds`.
    #[must_use]
    pub fn with(mut self, op: DriverOp, microseconds: u64) -> Self {
        self.per_call.insert(op.symbol().to_owned(), Duration::from_micros(microseconds));
        self
    }

    /// Adds times written as `symbol:microseconds`, separated by commas.
    ///
    /// # Errors
    /// The first entry that could not be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut latency = Self::default();
        for entry in text.split(',').map(str::trim).filter(|e| !e.is_empty()) {
            let parsed = entry
                .split_once(':')
                .and_then(|(symbol, time)| Some((symbol.trim(), time.trim().parse().ok()?)));
            let (symbol, microseconds) = parsed.ok_or_else(|| entry.to_owned())?;
            latency.per_call.insert(symbol.to_owned(), Duration::from_micros(microseconds));
        }
        Ok(latency)
    }

    #[expect(clippy::disallowed_methods, reason = "taking time is what a latency model is for")]
    pub(super) fn wait(&self, symbol: &str) {
        if let Some(time) = self.per_call.get(symbol) {
            std::thread::sleep(*time);
        }
    }
}
