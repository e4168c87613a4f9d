//! What a simulation did, in numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::usage::Usage;

/// Counters by name, in order.
pub(crate) type Counts = BTreeMap<String, u64>;

/// See the head of this module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) cycles: u64,
    pub(crate) pauses: u64,
    /// Pauses that released while they saved, by tag too.
    pub(crate) early: u64,
    /// Pauses that were to take contexts too.
    pub(crate) deep: u64,
    pub(crate) resumes: u64,
    pub(crate) swaps: u64,
    /// Of these, with both on their way simultaneously.
    pub(crate) overlapped: u64,
    /// Of the swaps, by what of each tenant moved.
    pub(crate) swapped: Counts,
    /// Commands that were refused, by cause.
    pub(crate) refused: Counts,
    /// Calls that were made to fail, by name.
    pub(crate) faults: Counts,
    /// Processes that were killed, by what was under way.
    pub(crate) kills: Counts,
    /// Commands by who gave them.
    pub(crate) commands: Counts,
    /// Commands that were needed to bring a tenant to one state.
    pub(crate) repairs: u64,
    pub(crate) joined: u64,
    pub(crate) left: u64,
    pub(crate) processes_max: usize,
    pub(crate) launches: u64,
    pub(crate) changes: u64,
    pub(crate) offered: u64,
    /// Papers for memory of others, by what came of them.
    pub(crate) papers: Counts,
    /// What was begun during a command, by name.
    pub(crate) deals: Counts,
    /// Slabs and parts of them that were there when all was compared, each time.
    pub(crate) slabs: u64,
    pub(crate) cells: u64,
    /// What was done with memory that is paged.
    pub(crate) paged: Counts,
    /// Commands while host memory was short, by what came of them.
    pub(crate) scarce: Counts,
    /// Processes that moved what they had saved to a file, each time, and how much that was.
    pub(crate) spillers: u64,
    pub(crate) spilled_bytes: u64,
    pub(crate) tag_pauses: u64,
    pub(crate) saves: u64,
    pub(crate) saved_bytes: u64,
    pub(crate) tag_resumes: u64,
    pub(crate) lost_imports: u64,
    pub(crate) checked_bytes: u64,
    /// The longest time that a command took, and what came of it.
    pub(crate) slowest: (Duration, String),
}

impl Tally {
    /// Adds `by` to the counter of this name.
    pub(crate) fn count(counts: &mut Counts, name: impl Into<String>, by: u64) {
        if by > 0 {
            *counts.entry(name.into()).or_default() += by;
        }
    }
}

fn listed(counts: &Counts) -> String {
    let texts: Vec<_> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
    if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |counts: &Counts| counts.values().sum::<u64>();
        writeln!(f, "cycles          {}", self.cycles)?;
        writeln!(
            f,
            "succeeded       {} pauses, {} resumes, {} swaps of which {} overlapped; {} released early, {} deep",
            self.pauses, self.resumes, self.swaps, self.overlapped, self.early, self.deep
        )?;
        writeln!(f, "swapped         {}", listed(&self.swapped))?;
        writeln!(f, "refused         {}: {}", sum(&self.refused), listed(&self.refused))?;
        writeln!(f, "given by        {}", listed(&self.commands))?;
        writeln!(f, "calls failed    {}: {}", sum(&self.faults), listed(&self.faults))?;
        writeln!(f, "killed          {}: {}", sum(&self.kills), listed(&self.kills))?;
        writeln!(f, "repairs         {}", self.repairs)?;
        writeln!(
            f,
            "processes       {} joined, {} left, {} together at most",
            self.joined, self.left, self.processes_max
        )?;
        writeln!(
            f,
            "work            {} launches, {} changes of memory, {} imports lost",
            self.launches, self.changes, self.lost_imports
        )?;
        writeln!(f, "by tag          {} pauses, {} resumes", self.tag_pauses, self.tag_resumes)?;
        writeln!(f, "shared          {} papers: {}", self.offered, listed(&self.papers))?;
        writeln!(f, "meanwhile       {}", listed(&self.deals))?;
        writeln!(f, "written         {} MiB by {} saves", self.saved_bytes >> 20, self.saves)?;
        writeln!(f, "memory short    {}", listed(&self.scarce))?;
        writeln!(
            f,
            "spilled         {} MiB by {} processes",
            self.spilled_bytes >> 20,
            self.spillers
        )?;
        writeln!(f, "of slabs        {} cells in {} slabs were compared", self.cells, self.slabs)?;
        writeln!(f, "paged           {}", listed(&self.paged))?;
        writeln!(f, "compared        {} MiB", self.checked_bytes >> 20)?;
        write!(f, "slowest command {}", seconds(self.slowest.0))?;
        write!(f, " ({})", self.slowest.1)
    }
}

/// What must be flat from the start of a simulation to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footprint {
    /// The simulation's own process, without children.
    pub(crate) own: Usage,
    /// Entries under the simulated node, which is where its shared memory is.
    pub(crate) shared_entries: usize,
    /// Entries in the run directory.
    pub(crate) run_entries: usize,
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} KiB resident, {} descriptors, {} entries in shared memory, {} in the run directory",
            self.own.resident_bytes >> 10,
            self.own.fds,
            self.shared_entries,
            self.run_entries
        )
    }
}

/// A time for people.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
