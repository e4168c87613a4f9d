//! A process writes what a pause has saved of it to files. Runs on the worker thread, a while at a time, so that no
//! step of a pause or resume comes between; one that does ends it. One that stands paused gives host memory to others in the same way:
//! its saved contents go to a file of its own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;
use vmm_pool::{Contents, Holding, HoldingSource, Pool, Spilled, Stance, WriteOut};

use super::Executor;
use crate::identity::{MemberId, TenantName};
use crate::member::Member;
use crate::member::failures::{PID, pool_failure, wrong_state};
use crate::saving::SaveDirError;
use crate::saving::dir::{FILE_PREFIX, SaveDir};
use crate::saving::map::{
    DeviceName, FORMAT, ImportedAllocation, MappedAt, Part, ProcessMap, ProcessName, SaveAccount,
    SavedAllocation, VERSION, WhyNot, rest_of,
};
use crate::time::millis;
use crate::wire::{
    Failure, FailureKind, MemberState, Reply, SaveProgress, SaveStage, SaveStep, SpillProgress,
    SpillStep,
};

/// No step takes longer, but for the last piece that it writes.
const STEP_MAX: Duration = Duration::from_secs(10);

/// Files that are being written. Dropping it removes what is not whole.
#[derive(Debug)]
pub(super) struct Saving {
    /// The connection that asked.
    connection: u64,
    dir: SaveDir,
    process: ProcessName,
    account: SaveAccount,
    holdings: Vec<Holding>,
    /// Made by the first step that writes.
    out: Option<WriteOut>,
    is_whole: bool,
}

impl Saving {
    pub(super) fn connection(&self) -> u64 {
        self.connection
    }

    fn file_name(&self, extension: &str) -> String {
        format!("{FILE_PREFIX}{}-{}.{extension}", self.process.pid, self.process.member)
    }

    fn data_name(&self) -> String {
        self.file_name("bin")
    }

    fn map_name(&self) -> String {
        self.file_name("json")
    }

    fn progress(&self, stage: SaveStage) -> SaveProgress {
        let written_bytes = self.out.as_ref().map_or(0, WriteOut::written_bytes);
        SaveProgress { account: self.account, written_bytes, stage }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        if !self.is_whole {
            self.dir.remove(&self.data_name());
            self.dir.remove(&self.map_name());
        }
    }
}

impl<D: Driver> Executor<D> {
    /// Does one step for `connection`, and answers for it.
    pub(super) fn run_save(&mut self, connection: u64, step: SaveStep) -> Reply {
        let outcome = match step {
            SaveStep::Begin { dir } => {
                let dir = SaveDir::open(&dir).map_err(|error| dir_failure(&error));
                dir.map(|dir| self.begin_save(connection, dir))
            }
            SaveStep::WriteOn { for_ms } => {
                let until = Instant::now() + Duration::from_millis(for_ms).min(STEP_MAX);
                self.write_on(connection, until)
            }
            SaveStep::CallOff => {
                self.saving.take_if(|saving| saving.connection == connection);
                Ok(SaveProgress {
                    account: SaveAccount::default(),
                    written_bytes: 0,
                    stage: SaveStage::CalledOff,
                })
            }
        };
        match outcome {
            Ok(progress) => Reply::Saving(Box::new(progress)),
            Err(failure) => {
                tracing::error!("{failure}");
                self.saving.take_if(|saving| saving.connection == connection);
                Reply::Failed(failure)
            }
        }
    }

    fn begin_save(&mut self, connection: u64, dir: SaveDir) -> SaveProgress {
        // The asking process holds the tenant's lock, so one that began before has lost it, and has ended.
        self.saving = None;
        let info = self.member.info();
        // Where not all is away, the rest is as the work behind the last whole pause has left it.
        let runs = info.state == MemberState::Active || info.stands_without.is_some();
        let standing = if runs { Stance::Runs } else { Stance::StandsStill };
        let holdings = self.pool.holdings().inventory(standing);
        let account = account_of(&holdings);
        let process = ProcessName::from(&info);
        let begun =
            Saving { connection, dir, process, account, holdings, out: None, is_whole: false };
        if standing == Stance::Runs && account.saved_bytes + account.not_kept_bytes == 0 {
            return begun.progress(SaveStage::Nothing);
        }
        self.saving.insert(begun).progress(SaveStage::Writing)
    }

    fn write_on(&mut self, connection: u64, until: Instant) -> Result<SaveProgress, Failure> {
        let Member { pool, presence, .. } = &*self.member;
        let of_asker = self.saving.as_mut().filter(|saving| saving.connection == connection);
        let Some(under_way) = of_asker else {
            return Err(wrong_state(format!(
                "process {PID} is not writing its saved contents to files any more: a pause, a resume or another save \
                 has begun meanwhile; try again"
            )));
        };
        if under_way.account.saved_bytes > 0 && !under_way.write_data(pool, until)? {
            return Ok(under_way.progress(SaveStage::Writing));
        }
        let name = under_way.write_map(pool, presence.tenant())?;
        let done = under_way.progress(SaveStage::Written { map: name });
        self.saving = None;
        Ok(done)
    }
}

impl Saving {
    /// Writes contents until `until`. True when all are in their file, and that has its name.
    fn write_data<D: Driver>(&mut self, pool: &Pool<D>, until: Instant) -> Result<bool, Failure> {
        let name = self.data_name();
        let out = if let Some(out) = &mut self.out {
            out
        } else {
            let file = self.dir.create_part(&name).map_err(|error| dir_failure(&error))?;
            let out = WriteOut::new(&self.holdings, file, self.dir.path().to_owned());
            self.out.insert(out.map_err(|error| pool_failure(&error))?)
        };
        if !out.write_on(pool, until).map_err(|error| pool_failure(&error))? {
            return Ok(false);
        }
        self.account.saved_bytes = out.total_bytes();
        self.dir.finish_part(&name).map_err(|error| dir_failure(&error))?;
        Ok(true)
    }

    /// Writes the map of what is written, and says its name: all is whole then.
    fn write_map<D: Driver>(
        &mut self,
        pool: &Pool<D>,
        tenant: &TenantName,
    ) -> Result<String, Failure> {
        let text = serde_json::to_vec_pretty(&self.map(pool, tenant)).map_err(|error| {
            FailureKind::Unknown.because(format!("process {PID}: the map of its contents: {error}"))
        })?;
        let name = self.map_name();
        self.dir.write_whole(&name, &text).map_err(|error| dir_failure(&error))?;
        self.is_whole = true;
        Ok(name)
    }

    fn map<D: Driver>(&self, pool: &Pool<D>, tenant: &TenantName) -> ProcessMap {
        let mut devices = BTreeMap::new();
        let mut allocations = Vec::new();
        let mut imports = Vec::new();
        for (index, holding) in self.holdings.iter().enumerate() {
            let written = self.out.as_ref().and_then(|out| out.written(index));
            let HoldingSource::Own { importers } = &holding.source else {
                imports.push(imported(holding));
                continue;
            };
            if written.is_none() && !holding.saved_parts.is_empty() {
                // Its application has freed it meanwhile.
                continue;
            }
            let device = holding.device.map(|ordinal| {
                let name = devices.entry(ordinal).or_insert_with(|| DeviceName {
                    uuid: pool.devices().uuid(ordinal),
                    ordinal: ordinal.0,
                });
                name.clone()
            });
            allocations.push(SavedAllocation {
                id: format!("{:?}", holding.id),
                library: holding.class.library.to_owned(),
                tag: holding.class.tag.clone(),
                contents: holding.class.contents,
                device,
                bytes: holding.size_bytes,
                addresses: addresses_of(holding),
                file_offset: written.map(|written| written.offset_bytes),
                saved: holding.saved_parts.iter().map(Part::from).collect(),
                not_saved: rest_of(&holding.saved_parts, holding.size_bytes),
                why_not: why_not(holding),
                crc32: written.map(|written| format!("{:08x}", written.crc32)),
                importers: importers.iter().map(|id| MemberId::from(*id).to_string()).collect(),
            });
        }
        ProcessMap {
            format: FORMAT.to_owned(),
            version: VERSION,
            tenant: tenant.to_string(),
            process: self.process.clone(),
            data: self.out.as_ref().map(|_| self.data_name()),
            account: self.account,
            allocations,
            imports,
        }
    }
}

fn imported(holding: &Holding) -> ImportedAllocation {
    let owner = match &holding.source {
        HoldingSource::Imported { owner } => Some(MemberId::from(*owner).to_string()),
        HoldingSource::Own { .. } | HoldingSource::Lost | HoldingSource::Foreign => None,
    };
    ImportedAllocation {
        id: format!("{:?}", holding.id),
        library: holding.class.library.to_owned(),
        tag: holding.class.tag.clone(),
        bytes: holding.size_bytes,
        addresses: addresses_of(holding),
        owner,
    }
}

fn addresses_of(holding: &Holding) -> Vec<MappedAt> {
    let mapped = holding.ranges.iter();
    mapped
        .map(|range| MappedAt { address: format!("{:#x}", range.start.0), bytes: range.size_bytes })
        .collect()
}

fn why_not(holding: &Holding) -> Option<WhyNot> {
    if !holding.saved_parts.is_empty() {
        return None;
    }
    Some(match (holding.is_resident, holding.class.contents) {
        (true, _) => WhyNot::InPlace,
        (false, Contents::Discard) => WhyNot::Discarded,
        (false, Contents::Keep | Contents::File | Contents::DiscardByTag) => WhyNot::Unused,
    })
}

fn account_of(holdings: &[Holding]) -> SaveAccount {
    let mut account = SaveAccount::default();
    for holding in holdings {
        if !holding.is_own() {
            account.imported_bytes += holding.size_bytes;
            continue;
        }
        let saved_bytes = holding.saved_bytes();
        account.saved_bytes += saved_bytes;
        let rest_bytes = holding.size_bytes - saved_bytes;
        if holding.is_resident && saved_bytes == 0 {
            account.in_place_bytes += rest_bytes;
        } else {
            account.not_kept_bytes += rest_bytes;
        }
    }
    account
}

fn dir_failure(error: &SaveDirError) -> Failure {
    let kind = match error {
        SaveDirError::Io { .. } => FailureKind::OutOfHostMemory,
        SaveDirError::NotEmpty { .. }
        | SaveDirError::NotPrivate { .. }
        | SaveDirError::Elsewhere { .. } => FailureKind::Unknown,
    };
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
    let message = format!("process {PID}: {error}{}", cause.unwrap_or_default());
    Failure { kind, message }
}

/// The longest duration of one step: the worker thread does nothing else meanwhile. The asking process waits for
/// longer.
pub(crate) const SPILL_STEP_TIME: Duration = Duration::from_mins(1);

impl<D: Driver> Executor<D> {
    /// Does one step, unless nobody waits for it any more, and answers for it.
    pub(super) fn run_spill(&mut self, step: SpillStep, is_called_off: &AtomicBool) -> Reply {
        let (state, rests) = self.lifecycle.since();
        let rests_ms = millis(rests);
        let limits = (self.member.config().host_limits)();
        let said = SpillProgress { rests_ms, limits, ..SpillProgress::default() };
        let may_move = self.member.config().spills
            && state == MemberState::Paused
            && !(self.member.config().is_in_memory)(&self.pool.host_memory().file_dir());
        if !may_move {
            return Reply::Spilled(Box::new(said));
        }
        if step.most_bytes == 0 {
            let left_bytes = self.pool.host_memory().movable_bytes();
            return Reply::Spilled(Box::new(SpillProgress { left_bytes, ..said }));
        }
        let is_called_off = || is_called_off.load(Ordering::Relaxed);
        let until = Instant::now() + SPILL_STEP_TIME;
        match self.pool.host_memory().spill(step.most_bytes, until, &is_called_off) {
            Ok(Spilled { moved_bytes, given_back_bytes, left_bytes }) => {
                tracing::info!(
                    moved_bytes,
                    given_back_bytes,
                    left_bytes,
                    "contents moved to a file"
                );
                let done = SpillProgress { left_bytes, given_back_bytes, ..said };
                Reply::Spilled(Box::new(done))
            }
            Err(error) => {
                let failure = pool_failure(&error);
                self.member.notes.add(format!(
                    "saved contents were to go to a file to make room, and stay in host memory: {failure}"
                ));
                self.refuse(failure)
            }
        }
    }
}
