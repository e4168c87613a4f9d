//! Writes the saved contents of a process to files. This runs on the worker thread in short steps, so no step of a pause or
//! resume runs during one of them. A pause or resume ends the writing. A paused process frees host memory for others in the same
//! way: its saved contents go to a file of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sublet_disk::WriteOut;
use vmm_pool::driver::Driver;
use vmm_pool::{Contents, Holding, HoldingSource, Pool, PoolError, Spilled, Stance};

use crate::dir::{FILE_PREFIX, SaveDir};
use crate::map::{
    DeviceName, FORMAT, ImportedAllocation, MappedAt, Part, ProcessMap, ProcessName,
    SavedAllocation, VERSION, WhyNot, rest_of,
};
use crate::settings::Settings;
use sublet_member::{Desk, Member, PID, pool_failure};
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::saving::SaveAccount;
use sublet_protocol::time::millis;
use sublet_protocol::wire::{
    Failure, FailureKind, MemberState, Reply, SaveProgress, SaveStage, SaveStep, SpillProgress,
    SpillStep,
};

/// The longest time of a step, except for its last piece.
const STEP_MAX: Duration = Duration::from_secs(10);

/// The part of a member's worker thread that writes files.
#[derive(Debug)]
pub(super) struct Worker<D: Driver> {
    pub(super) member: Arc<Member<D>>,
    pub(super) settings: Settings,
    pub(super) saving: Option<Saving>,
}

/// Files that are being written. Dropping it removes incomplete files.
#[derive(Debug)]
pub(super) struct Saving {
    /// The connection that requested the files.
    connection: u64,
    dir: SaveDir,
    process: ProcessName,
    account: SaveAccount,
    holdings: Vec<Holding>,
    /// Created by the first step that writes.
    out: Option<WriteOut>,
    is_whole: bool,
}

impl Drop for Saving {
    fn drop(&mut self) {
        if !self.is_whole {
            let ours = self.file_name("");
            self.dir.remove_all(|name| name.starts_with(&ours));
        }
    }
}

impl<D: Driver> Desk for Worker<D> {
    fn save(&mut self, connection: u64, step: SaveStep) -> Reply {
        let outcome = match step {
            SaveStep::Begin { dir } => {
                let dir = SaveDir::open(&dir).map_err(Failure::from);
                dir.map(|dir| self.begin_save(connection, dir))
            }
            SaveStep::WriteOn { for_ms } => {
                let until = Instant::now() + Duration::from_millis(for_ms).min(STEP_MAX);
                self.write_on(connection, until)
            }
            SaveStep::CallOff => {
                self.close(connection);
                let (account, stage) = (SaveAccount::default(), SaveStage::CalledOff);
                Ok(SaveProgress { account, written_bytes: 0, stage })
            }
        };
        outcome.map_or_else(
            |failure| {
                tracing::error!("{failure}");
                self.close(connection);
                Reply::Failed(failure)
            },
            |progress| Reply::Saving(Box::new(progress)),
        )
    }

    fn spill(&mut self, step: SpillStep, is_called_off: &AtomicBool) -> Result<Reply, Failure> {
        // The step moves contents that are being written. A query (0 bytes) moves nothing.
        if step.most_bytes > 0 {
            self.stop();
        }
        let (member, host) = (&self.member, self.member.pool().host_memory());
        let (state, rests) = member.lifecycle().since();
        let (rests_ms, limits) = (millis(rests), (member.config().host_limits)());
        let may_move = state == MemberState::Paused
            && self.settings.spills.is_some_and(|may| may(&host.file_dir()));
        let spilled = if !may_move {
            Ok(Spilled::default())
        } else if step.most_bytes == 0 {
            Ok(Spilled { left_bytes: host.movable_bytes(), ..Spilled::default() })
        } else {
            let is_called_off = || is_called_off.load(Ordering::Relaxed);
            host.spill(step.most_bytes, Instant::now() + SpillStep::TIME_MAX, &is_called_off)
        };
        let spilled = spilled.map_err(|error| {
            let failure = pool_failure(&error);
            // Another tenant's pause lacks host memory, and the saved contents of this tenant could not move to a
            // file to make space. They stay in host memory, and the other pause may be refused. Free host memory, or
            // name a disk with space.
            member.notes().add(format!(
                "saved contents were to go to a file to make room, and stay in host memory: {failure}"
            ));
            failure
        })?;
        let Spilled { moved_bytes, given_back_bytes, left_bytes } = spilled;
        if moved_bytes > 0 {
            tracing::info!(moved_bytes, given_back_bytes, left_bytes, "contents moved to a file");
        }
        let progress = SpillProgress { left_bytes, given_back_bytes, rests_ms, limits };
        Ok(Reply::Spilled(Box::new(progress)))
    }

    fn stop(&mut self) {
        self.saving = None;
    }

    fn close(&mut self, connection: u64) {
        self.saving.take_if(|saving| saving.connection == connection);
    }
}

impl<D: Driver> Worker<D> {
    fn begin_save(&mut self, connection: u64, dir: SaveDir) -> SaveProgress {
        // The requesting process holds the tenant's lock. So an earlier one has lost the lock, and has ended.
        self.saving = None;
        let info = self.member.info();
        // If only a part is paused, the rest is as the work since the last whole pause has left it.
        let runs = info.state == MemberState::Active || info.stands_without.is_some();
        let standing = if runs { Stance::Runs } else { Stance::StandsStill };
        let holdings = self.member.pool().holdings().inventory(standing);
        let account = account_of(&holdings);
        if runs && account.saved_bytes + account.not_kept_bytes == 0 {
            return SaveProgress { account, written_bytes: 0, stage: SaveStage::Nothing };
        }
        let process = ProcessName::from(&info);
        let (out, is_whole) = (None, false);
        self.saving = Some(Saving { connection, dir, process, account, holdings, out, is_whole });
        SaveProgress { account, written_bytes: 0, stage: SaveStage::Writing }
    }

    fn write_on(&mut self, connection: u64, until: Instant) -> Result<SaveProgress, Failure> {
        let of_asker = self.saving.as_mut().filter(|saving| saving.connection == connection);
        let Some(saving) = of_asker else {
            // During `sublet save`, another command began to pause, resume or save the tenant. The files are
            // incomplete. Run `sublet save` again.
            return Err(FailureKind::WrongState.because(format!(
                "process {PID} is not writing its saved contents to files any more: a pause, a resume or another save \
                 has begun meanwhile; try again"
            )));
        };
        let stage = saving.write_on(self.member.pool(), self.member.presence().tenant(), until)?;
        let written_bytes = saving.out.as_ref().map_or(0, WriteOut::written_bytes);
        let progress = SaveProgress { account: saving.account, written_bytes, stage };
        self.saving.take_if(|saving| saving.is_whole);
        Ok(progress)
    }
}

impl Saving {
    fn file_name(&self, extension: &str) -> String {
        format!("{FILE_PREFIX}{}-{}.{extension}", self.process.pid, self.process.member)
    }

    /// Writes contents until `until`. When the file has all contents and its final name, writes their map. Then the save is
    /// complete.
    fn write_on<D: Driver>(
        &mut self,
        pool: &Pool<D>,
        tenant: &TenantName,
        until: Instant,
    ) -> Result<SaveStage, Failure> {
        if self.account.saved_bytes > 0 {
            let (name, refused) = (self.file_name("bin"), |error: PoolError| pool_failure(&error));
            let out = if let Some(out) = &mut self.out {
                out
            } else {
                let (file, dir) = (self.dir.create_part(&name)?, self.dir.path().to_owned());
                self.out.insert(WriteOut::new(&self.holdings, file, dir).map_err(refused)?)
            };
            if !out.write_on(pool, until).map_err(refused)? {
                return Ok(SaveStage::Writing);
            }
            self.account.saved_bytes = out.total_bytes();
            self.dir.finish_part(&name)?;
        }
        let map = self.file_name("json");
        let text = serde_json::to_vec_pretty(&self.map(pool, tenant)).map_err(|error| {
            // The file that says where each memory range is saved could not be written. The reason follows. The
            // tenant stays paused. Mend the reason, then run `sublet save` again.
            FailureKind::Unknown.because(format!("process {PID}: the map of its contents: {error}"))
        })?;
        self.dir.write_whole(&map, &text)?;
        self.is_whole = true;
        Ok(SaveStage::Written { map })
    }

    fn map<D: Driver>(&self, pool: &Pool<D>, tenant: &TenantName) -> ProcessMap {
        let (mut allocations, mut imports) = (Vec::new(), Vec::new());
        for (index, holding) in self.holdings.iter().enumerate() {
            let HoldingSource::Own { importers } = &holding.source else {
                imports.push(imported(holding));
                continue;
            };
            let written = self.out.as_ref().and_then(|out| out.written(index));
            if written.is_none() && !holding.saved_parts.is_empty() {
                // The application has freed the allocation meanwhile.
                continue;
            }
            allocations.push(SavedAllocation {
                id: format!("{:?}", holding.id),
                library: holding.class.library.to_owned(),
                tag: holding.class.tag.clone(),
                contents: holding.class.contents,
                device: holding.device.map(|ordinal| DeviceName {
                    uuid: pool.devices().uuid(ordinal),
                    ordinal: ordinal.0,
                }),
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
            data: self.out.as_ref().map(|_| self.file_name("bin")),
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
    let why = match (holding.is_resident, holding.class.contents) {
        (true, _) => WhyNot::InPlace,
        (false, Contents::Discard) => WhyNot::Discarded,
        (false, Contents::Keep | Contents::File | Contents::DiscardByTag) => WhyNot::Unused,
    };
    holding.saved_parts.is_empty().then_some(why)
}

fn account_of(holdings: &[Holding]) -> SaveAccount {
    let mut account = SaveAccount::default();
    for holding in holdings {
        let saved_bytes = holding.saved_bytes();
        account.saved_bytes += saved_bytes;
        let kind = if !holding.is_own() {
            &mut account.imported_bytes
        } else if holding.is_resident && saved_bytes == 0 {
            &mut account.in_place_bytes
        } else {
            &mut account.not_kept_bytes
        };
        *kind += holding.size_bytes - saved_bytes;
    }
    account
}
