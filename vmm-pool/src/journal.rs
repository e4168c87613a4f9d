//! The records of phases, step by step, for the report.

use std::time::Instant;

use sublet_sync::time::micros;

use serde::{Deserialize, Serialize};

use crate::error::PoolResult;
use crate::report::KeptBytes;

/// A named part of a phase, and the time that it took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The name of the work that was done.
    pub name: &'static str,
    /// The time that the work took, in microseconds.
    pub elapsed_us: u64,
}

/// The record of a phase, for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepLog {
    /// The steps of the phase, in order.
    pub steps: Vec<Step>,
    /// The number of driver calls that the phase made.
    pub driver_calls: u64,
    /// The device memory that the phase concerned, in bytes.
    pub bytes: u64,
    /// For a save: the contents that it kept, by the way in which it kept them.
    pub kept: Option<KeptBytes>,
    /// Problems that did not stop the phase, one sentence each.
    pub notes: Vec<String>,
}

impl StepLog {
    pub(crate) fn timed<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Self) -> PoolResult<T>,
    ) -> PoolResult<T> {
        let begin = Instant::now();
        let outcome = work(self);
        self.add_step(Step { name, elapsed_us: micros(begin.elapsed()) });
        outcome
    }

    fn add_step(&mut self, more: Step) {
        match self.steps.iter_mut().find(|step| step.name == more.name) {
            Some(step) => step.elapsed_us += more.elapsed_us,
            None => self.steps.push(more),
        }
    }

    /// Returns the time that the work of this name took, in microseconds.
    pub fn spent_us(&self, name: &str) -> u64 {
        let steps = self.steps.iter().filter(|step| step.name == name);
        steps.map(|step| step.elapsed_us).sum()
    }

    /// Adds the record of another part of the same phase to this one.
    pub fn add(&mut self, other: Self) {
        other.steps.into_iter().for_each(|step| self.add_step(step));
        self.driver_calls += other.driver_calls;
        self.bytes += other.bytes;
        self.kept = match (self.kept, other.kept) {
            (Some(one), Some(more)) => Some(one.plus(more)),
            (one, more) => one.or(more),
        };
        self.notes.extend(other.notes);
    }

    /// Counts one more driver call.
    pub(crate) fn call(&mut self) {
        self.driver_calls += 1;
    }
}
