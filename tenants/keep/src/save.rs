//! Lets every process of a tenant write its saved contents to files.
//!
//! It takes no part in pauses and resumes, and changes no state. A half-paused or faulted process writes what it has. A process
//! that cannot answer does not stop the others.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use sublet_coordinator::{Coordinator, Everybody, Inquiry, Next, Peers, Trouble, Who};
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{RunDirError, TenantDir, trusted_path};
use sublet_protocol::saving::SaveDirError;
use sublet_protocol::time::{micros, millis};
use sublet_protocol::wire::{Action, SaveProgress, SaveStage, SaveStep};

use crate::dir::{PART_SUFFIX, SaveDir};
use crate::map::{
    FORMAT, FailedProcess, ProcessName, SavedProcess, TENANT_MAP, TenantMap, VERSION,
};

/// The time for which a process writes before it reports its progress.
const SLICE: Duration = Duration::from_millis(500);
/// The longest further time for an answer, unless the options set another. The process may have to finish a step of a pause or
/// resume first, or its disk may be slow.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
/// The time within which processes must remove what they have written.
const CALL_OFF_TIMEOUT: Duration = Duration::from_secs(10);

/// The progress of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveState {
    /// The process.
    pub who: Who,
    /// The bytes that it has to write.
    pub total_bytes: u64,
    /// The bytes that it has written.
    pub written_bytes: u64,
}

/// The account of what was written.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SaveReport {
    /// The folder that was written to, as an absolute path.
    pub dir: PathBuf,
    /// From the first message to the last file, in microseconds.
    pub wall_us: u64,
    /// Processes that had ended before, and whose contents are gone with them.
    pub ended: usize,
    /// As in the file [`TENANT_MAP`].
    pub map: TenantMap,
}

/// Processes that have contents to write, each with its last answer.
type Writers = Vec<(usize, SaveProgress)>;

/// Lets every process write its saved contents to files in `dir`. The directory is created, or must be empty and private to the
/// user. Nothing else changes: the tenant stays as it is, and can be resumed afterwards. Blocks other pauses and resumes of the
/// tenant meanwhile. `progress` is called with all writing processes each time one of them reports.
///
/// # Errors
/// [`Trouble`]; nothing is left in `dir` then. If only some processes have written, it succeeds, and the result names the others.
pub fn save(
    coordinator: &Coordinator,
    dir: &Path,
    progress: &mut dyn FnMut(&[SaveState]),
) -> Result<SaveReport, Trouble> {
    let span = tracing::info_span!("tenant.save", tenant = %coordinator.tenant());
    let _entered = span.enter();
    let started = Instant::now();
    let tenant_dir = coordinator.dir()?;
    let lock = coordinator.lock(&tenant_dir, Action::Resume).map_err(|error| {
        if let Trouble::CalledOff { tenant, .. } = error {
            return Trouble::NotSaved { tenant };
        }
        error
    })?;
    // A user who could rename a parent directory could put other contents at this path.
    trusted_path::check_above_all(dir).map_err(not_private)?;
    let target = SaveDir::prepare(dir)?;
    let saved = save_into(coordinator, &tenant_dir, &target, progress);
    if saved.is_err() {
        target.undo();
    }
    drop(lock);
    let (map, ended) = saved?;
    let (dir, wall_us) = (target.path().to_owned(), micros(started.elapsed()));
    Ok(SaveReport { dir, wall_us, ended, map })
}

/// Saves into `target`. Also returns how many processes had ended before.
fn save_into(
    coordinator: &Coordinator,
    dir: &TenantDir,
    target: &SaveDir,
    progress: &mut dyn FnMut(&[SaveState]),
) -> Result<(TenantMap, usize), Trouble> {
    let mut all = coordinator.greeted(dir)?;
    refuse_called_off(coordinator)?;
    let written = write_all(coordinator, &mut all, target, progress);
    if written.is_err() {
        // The processes remove their files, and no more files come into the directory.
        all.peers.tell(&all.peers.all(), SaveStep::CallOff, CALL_OFF_TIMEOUT);
    }
    let map = map_of(coordinator.tenant(), &all, written?);
    // Files of processes that have failed without an answer.
    target.remove_all(|name| name.ends_with(PART_SUFFIX));
    let mut text = serde_json::to_vec_pretty(&map).unwrap_or_default();
    text.push(b'\n');
    target.write_whole(TENANT_MAP, &text)?;
    Ok((map, all.peers.dead()))
}

/// Queries the sizes of all processes, checks that the sum fits, and lets all write in parallel, in short steps. Returns the
/// processes that have written all, and those that have nothing.
fn write_all(
    coordinator: &Coordinator,
    all: &mut Everybody,
    target: &SaveDir,
    progress: &mut dyn FnMut(&[SaveState]),
) -> Result<(Writers, Vec<usize>), Trouble> {
    let (tenant, dir) = (coordinator.tenant().clone(), target.path().to_owned());
    let options = coordinator.options();
    let timeout = options.timeout.unwrap_or(ANSWER_TIMEOUT) + options.reply_margin;
    let interrupt = options.interrupt.as_ref();
    let (mut writers, mut idle) = (Writers::new(), Vec::new());
    let begin = SaveStep::Begin { dir: target.name()? };
    let greeted = all.peers.greeted();
    all.ask(&greeted, Inquiry::of(begin, timeout, interrupt), |_, index, said| {
        match said.stage {
            SaveStage::Nothing => idle.push(index),
            SaveStage::Writing | SaveStage::Written { .. } | SaveStage::CalledOff => {
                writers.push((index, said));
            }
        }
        Next::Done
    });
    refuse_called_off(coordinator)?;
    writers.sort_by_key(|(index, _)| all.peers.who(*index).pid);
    let needed_bytes = writers.iter().map(|(_, said)| said.account.saved_bytes).sum();
    let free_bytes = target.free_bytes()?;
    if free_bytes < needed_bytes {
        return Err(Trouble::NoSpace { tenant, dir, needed_bytes, free_bytes });
    }
    progress(&states(&all.peers, &writers));
    let members: Vec<usize> = writers.iter().map(|(index, _)| *index).collect();
    let on = SaveStep::WriteOn { for_ms: millis(SLICE) };
    let write = Inquiry::of(on.clone(), SLICE + timeout, interrupt);
    all.ask(&members, write, |peers, index, said| {
        let is_whole = matches!(said.stage, SaveStage::Written { .. });
        for (_, last) in writers.iter_mut().filter(|(writer, _)| *writer == index) {
            (last.written_bytes, last.stage) = (said.written_bytes, said.stage.clone());
        }
        progress(&states(peers, &writers));
        if is_whole { Next::Done } else { Next::Again(on.clone()) }
    });
    refuse_called_off(coordinator)?;
    writers.retain(|(_, said)| matches!(said.stage, SaveStage::Written { .. }));
    // A process whose answer was late may have finished all the same.
    let has_written = |who| writers.iter().any(|(index, _)| all.peers.who(*index) == who);
    all.failures.retain(|failure| !has_written(failure.who));
    match (writers.is_empty(), all.failures.is_empty()) {
        (false, _) => Ok((writers, idle)),
        (true, true) => Err(Trouble::NothingSaved { tenant }),
        (true, false) => Err(Trouble::SaveFailed { tenant, dir, failures: all.failures.clone() }),
    }
}

fn refuse_called_off(coordinator: &Coordinator) -> Result<(), Trouble> {
    if coordinator.options().is_called_off() {
        return Err(Trouble::NotSaved { tenant: coordinator.tenant().clone() });
    }
    Ok(())
}

fn map_of(
    tenant: &TenantName,
    all: &Everybody,
    (writers, idle): (Writers, Vec<usize>),
) -> TenantMap {
    let name_of = |index: usize| all.peers.info(index).map(ProcessName::from);
    let processes =
        writers.into_iter().filter_map(|(index, SaveProgress { account, stage, .. })| {
            let SaveStage::Written { map } = stage else { return None };
            Some(SavedProcess { process: name_of(index)?, map, account })
        });
    let failed = all.failures.iter().map(|failure| FailedProcess {
        pid: failure.who.pid,
        member: failure.who.member.to_string(),
        why: failure.failure.message.clone(),
    });
    TenantMap {
        format: FORMAT.to_owned(),
        version: VERSION,
        tenant: tenant.to_string(),
        complete: all.failures.is_empty(),
        processes: processes.collect(),
        nothing_saved: idle.into_iter().filter_map(name_of).collect(),
        failed: failed.collect(),
    }
}

/// Returns the progress of every writer.
fn states(peers: &Peers, writers: &Writers) -> Vec<SaveState> {
    let state = |(index, said): &(usize, SaveProgress)| SaveState {
        who: peers.who(*index),
        total_bytes: said.account.saved_bytes,
        written_bytes: said.written_bytes,
    };
    writers.iter().map(state).collect()
}

fn not_private(error: RunDirError) -> SaveDirError {
    if let RunDirError::NotOurs { path, problem, next_step } = error {
        let problem = format!("{problem}: {next_step}, or name another directory");
        return SaveDirError::NotPrivate { path, problem };
    }
    let (path, source) = if let RunDirError::Io { path, source, .. } = error {
        (path, source)
    } else {
        (PathBuf::new(), io::Error::other(error))
    };
    SaveDirError::Io { operation: "looking at", path, source }
}
