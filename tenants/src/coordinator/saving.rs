//! Has every process of a tenant write what it has saved to files.
//!
//! It takes no part in pauses and resumes and changes nothing: a process that stands half-way, or is faulted, is asked
//! as it is, and one that cannot answer does not keep the others from writing.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::cast::Everybody;
use super::conversation::{Inquiry, Next};
use super::peers::Peers;
use super::report::{MemberFailure, Who};
use super::{Coordinator, Trouble};
use crate::run_dir::{RunDirError, TenantDir, trusted_path};
use crate::saving::dir::SaveDir;
use crate::saving::map::{
    FORMAT, FailedProcess, ProcessName, SaveAccount, SavedProcess, TENANT_MAP, TenantMap, VERSION,
};
use crate::saving::{PART_SUFFIX, SaveDirError};
use crate::time::{micros, millis};
use crate::wire::{Action, SaveProgress, SaveStage, SaveStep};

/// The time for which a process writes before it says how far it is.
const SLICE: Duration = Duration::from_millis(500);
/// Beyond that, how long its answer may take, unless the options say otherwise: it may have a step of a pause or
/// resume to finish first, or a slow disk.
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

/// A process that has something to write.
struct Writer {
    peer: usize,
    account: SaveAccount,
    written_bytes: u64,
    /// The name of its map, once all is written.
    map: Option<String>,
}

/// The state of all processes during a save.
#[derive(Default)]
struct Save {
    peers: Peers,
    ended: usize,
    writers: Vec<Writer>,
    /// Indexes of peers.
    idle: Vec<usize>,
    failures: Vec<MemberFailure>,
}

impl Coordinator {
    /// Has every process write what it has saved to files in `dir`, which is made, or must be empty and its user's
    /// alone. Nothing else changes: the tenant stays as it is, and can be resumed afterwards. Blocks other pauses and
    /// resumes of the tenant for as long as it takes. `progress` is told about all that write, each time one of them
    /// says how far it is.
    ///
    /// # Errors
    /// [`Trouble`]; nothing is left in `dir` then. Where some processes have written and others not, it succeeds and
    /// says who has not.
    pub fn save(
        &mut self,
        dir: &Path,
        progress: &mut dyn FnMut(&[SaveState]),
    ) -> Result<SaveReport, Trouble> {
        let span = tracing::info_span!("tenant.save", tenant = %self.tenant);
        let _entered = span.enter();
        let started = Instant::now();
        let tenant_dir = self.dir()?;
        let lock = self.lock(&tenant_dir, Action::Resume).map_err(|error| {
            if let Trouble::CalledOff { tenant, .. } = error {
                return Trouble::NotSaved { tenant };
            }
            error
        })?;
        // A user who could rename a directory above could put other contents in this place.
        trusted_path::check_above_all(dir).map_err(not_private)?;
        let target = SaveDir::prepare(dir)?;
        let saved = self.save_into(&tenant_dir, &target, progress);
        if saved.is_err() {
            target.undo();
        }
        drop(lock);
        let (map, ended) = saved?;
        Ok(SaveReport {
            dir: target.path().to_owned(),
            wall_us: micros(started.elapsed()),
            ended,
            map,
        })
    }

    fn save_into(
        &self,
        tenant_dir: &TenantDir,
        target: &SaveDir,
        progress: &mut dyn FnMut(&[SaveState]),
    ) -> Result<(TenantMap, usize), Trouble> {
        let mut save = self.greet_all(tenant_dir)?;
        let begun = self.begin_all(target, &mut save).and_then(|()| {
            self.write_all(&mut save, progress)?;
            if save.writers.is_empty() {
                let (tenant, dir) = (self.tenant.clone(), target.path().to_owned());
                return Err(if save.failures.is_empty() {
                    Trouble::NothingSaved { tenant }
                } else {
                    Trouble::SaveFailed { tenant, dir, failures: save.failures.clone() }
                });
            }
            Ok(())
        });
        if begun.is_err() {
            // They remove what they have written, and nothing comes into the directory any more.
            let members = save.peers.all();
            save.peers.tell(&members, SaveStep::CallOff, CALL_OFF_TIMEOUT);
        }
        begun?;
        // Of processes that have failed without a word.
        target.remove_all(|name| name.ends_with(PART_SUFFIX.as_bytes()));
        let map = self.map_of(&save);
        let mut text = serde_json::to_vec_pretty(&map).unwrap_or_default();
        text.push(b'\n');
        target.write_whole(TENANT_MAP, &text)?;
        Ok((map, save.ended))
    }

    /// Connects to every process that lives, and asks who it is.
    fn greet_all(&self, tenant_dir: &TenantDir) -> Result<Save, Trouble> {
        let (timeout, interrupt) = (self.options.contact_timeout, self.options.interrupt.as_ref());
        let Everybody { peers, failures } = Everybody::greeted(tenant_dir, timeout, interrupt)?;
        self.refuse_called_off()?;
        Ok(Save { ended: peers.dead(), peers, failures, ..Save::default() })
    }

    /// Asks every process what it has, and looks whether all of it fits.
    fn begin_all(&self, target: &SaveDir, save: &mut Save) -> Result<(), Trouble> {
        let begin = SaveStep::Begin { dir: target.name()? };
        let Save { peers, writers, idle, failures, .. } = save;
        let greeted = peers.greeted();
        let begin = Inquiry::of(begin, self.answer_timeout(), self.options.interrupt.as_ref());
        peers.converse(&greeted, begin, |_, peer, said| {
            match said {
                Ok(SaveProgress { stage: SaveStage::Nothing, .. }) => idle.push(peer),
                Ok(SaveProgress { account, .. }) => {
                    writers.push(Writer { peer, account, written_bytes: 0, map: None });
                }
                Err(failure) => failures.push(failure),
            }
            Next::Done
        });
        self.refuse_called_off()?;
        save.writers.sort_by_key(|writer| save.peers.who(writer.peer).pid);
        let needed_bytes = save.writers.iter().map(|writer| writer.account.saved_bytes).sum();
        let free_bytes = target.free_bytes()?;
        if free_bytes < needed_bytes {
            let (tenant, dir) = (self.tenant.clone(), target.path().to_owned());
            return Err(Trouble::NoSpace { tenant, dir, needed_bytes, free_bytes });
        }
        Ok(())
    }

    /// Has all write at the same time, each a while at a time.
    fn write_all(
        &self,
        save: &mut Save,
        progress: &mut dyn FnMut(&[SaveState]),
    ) -> Result<(), Trouble> {
        let Save { peers, writers, failures, .. } = save;
        let members: Vec<usize> = writers.iter().map(|writer| writer.peer).collect();
        let on = SaveStep::WriteOn { for_ms: millis(SLICE) };
        let timeout = SLICE + self.answer_timeout();
        progress(&states(peers, writers));
        let write = Inquiry::of(on.clone(), timeout, self.options.interrupt.as_ref());
        peers.converse(&members, write, |peers, index, said| {
            let mut next = Next::Done;
            let writer = writers.iter_mut().find(|writer| writer.peer == index);
            match (said, writer) {
                (Ok(SaveProgress { written_bytes, stage, .. }), Some(writer)) => {
                    writer.written_bytes = written_bytes;
                    match stage {
                        SaveStage::Written { map } => writer.map = Some(map),
                        SaveStage::Nothing | SaveStage::Writing | SaveStage::CalledOff => {
                            next = Next::Again(on.clone());
                        }
                    }
                }
                (Ok(_), None) => {}
                (Err(failure), _) => failures.push(failure),
            }
            progress(&states(peers, writers));
            next
        });
        self.refuse_called_off()?;
        save.writers.retain(|writer| writer.map.is_some());
        // One that was late for an answer may have come to its end all the same.
        let Save { peers, writers, failures, .. } = save;
        let has_written = |who: Who| writers.iter().any(|w| peers.who(w.peer) == who);
        failures.retain(|failure| !has_written(failure.who));
        Ok(())
    }

    fn answer_timeout(&self) -> Duration {
        self.options.timeout.unwrap_or(ANSWER_TIMEOUT) + self.options.reply_margin
    }

    fn refuse_called_off(&self) -> Result<(), Trouble> {
        if self.options.is_called_off() {
            return Err(Trouble::NotSaved { tenant: self.tenant.clone() });
        }
        Ok(())
    }

    fn map_of(&self, save: &Save) -> TenantMap {
        let info_of = |index: usize| save.peers.info(index);
        let processes = save.writers.iter().filter_map(|writer| {
            Some(SavedProcess {
                process: info_of(writer.peer)?.into(),
                map: writer.map.clone()?,
                account: writer.account,
            })
        });
        let failed = save.failures.iter().map(|failure| FailedProcess {
            pid: failure.who.pid,
            member: failure.who.member.to_string(),
            why: failure.failure.message.clone(),
        });
        TenantMap {
            format: FORMAT.to_owned(),
            version: VERSION,
            tenant: self.tenant.to_string(),
            complete: save.failures.is_empty(),
            processes: processes.collect(),
            nothing_saved: save
                .idle
                .iter()
                .filter_map(|&i| info_of(i))
                .map(ProcessName::from)
                .collect(),
            failed: failed.collect(),
        }
    }
}

/// The progress of every writer.
fn states(peers: &Peers, writers: &[Writer]) -> Vec<SaveState> {
    let state = |writer: &Writer| SaveState {
        who: peers.who(writer.peer),
        total_bytes: writer.account.saved_bytes,
        written_bytes: writer.written_bytes,
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
