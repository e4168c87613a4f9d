//! A pool as the process has it that owns it: calls go in through the gate, and the steps of a pause and resume are
//! made one at a time, as a coordinator does.

#![expect(clippy::wildcard_enum_match_arm, reason = "every stage out of turn ends the test")]

use std::collections::HashMap;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::SimDriver;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, RawContext, VaRange,
};
use vmm_pool::{
    AllocationId, Arriving, Aside, Away, Borrowed, ByDevice, Class, Copies, Departing, Export,
    Failed, FromOffloaded, FromOpen, HostBudget, ImportRequest, ImportSource, Keeper, Leaving,
    Moved, Origin, Pool, PoolResult, Prepared, Quiesced, Restored, Returning, Schedule, Selection,
    Shut, StayReason, StepLog, Undone, VirtualHandle,
};

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct SimPool {
    pool: Arc<Pool<SimDriver>>,
    stage: Mutex<Stage>,
    /// What the next save is told.
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    unused: Vec<VaRange>,
    stays: Vec<(AllocationId, StayReason)>,
}

#[derive(Debug)]
enum Stage {
    Rest,
    Quiesced(Quiesced<SimDriver>),
    Leaving(Leaving<SimDriver>),
    Prepared(Prepared<SimDriver>),
    Departing(Departing<SimDriver>),
    Arriving(Arriving<SimDriver>),
    Returning(Returning<SimDriver>),
    Restored(Restored<SimDriver>),
    /// Undone, with descriptors that nobody needs.
    Undone(Vec<OwnedFd>),
}

impl Deref for SimPool {
    type Target = Arc<Pool<SimDriver>>;

    fn deref(&self) -> &Self::Target {
        &self.pool
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_mins(1)
}

impl SimPool {
    pub(crate) fn new(driver: Arc<SimDriver>, toucher_threads: usize) -> Self {
        Self::with_contexts(driver, toucher_threads, Vec::new)
    }

    pub(crate) fn with_contexts(
        driver: Arc<SimDriver>,
        toucher_threads: usize,
        own_contexts: fn() -> Vec<RawContext>,
    ) -> Self {
        // Its keeper goes back to the pool, which gives it to whatever begins.
        let (pool, _) = Pool::new(driver, toucher_threads, own_contexts);
        Self::of(pool)
    }

    /// Another hand on the same pool.
    pub(crate) fn of(pool: Arc<Pool<SimDriver>>) -> Self {
        pool.host_memory().make_files_by(sublet_disk::file);
        Self { pool, stage: Mutex::new(Stage::Rest), told: Mutex::default() }
    }

    pub(crate) fn pool(&self) -> &Arc<Pool<SimDriver>> {
        &self.pool
    }

    /// For what begins now.
    pub(crate) fn keeper(&self) -> Keeper<SimDriver> {
        self.pool.keeper().expect("nothing is under way")
    }

    pub(crate) fn shut<W: Origin>(&self) -> Shut<SimDriver, W> {
        let shut = self.keeper().shut(soon(), || false);
        shut.map_err(|failed| failed.error).expect("nobody is inside")
    }

    fn take(&self) -> Stage {
        std::mem::replace(&mut *self.stage.lock().expect("no test has failed"), Stage::Rest)
    }

    fn put(&self, stage: Stage) {
        *self.stage.lock().expect("no test has failed") = stage;
    }

    /// The gate is shut, and the devices are drained.
    fn quiesce(&self) -> Quiesced<SimDriver> {
        if let Stage::Quiesced(quiesced) = self.take() {
            return quiesced;
        }
        let draining = self.shut::<FromOpen>().into_draining();
        let never = crossbeam_channel::never();
        let (quiesced, _) =
            draining.drain(soon(), &never).map_err(|failed| failed.error).expect("no work");
        quiesced
    }

    /// Drains, so that the driver calls of the save that follows are its own.
    pub(crate) fn drain(&self) {
        let quiesced = self.quiesce();
        let told = self.told.lock().expect("no test has failed");
        quiesced.mark_unused(&told.unused, &Selection::Whole);
        drop(told);
        self.put(Stage::Quiesced(quiesced));
    }

    pub(crate) fn save(&self, selection: &Selection, budget: HostBudget) -> PoolResult<StepLog> {
        self.prepare(selection, budget, Schedule::SaveFirst)
    }

    /// Instead of a save.
    pub(crate) fn reserve(&self, selection: &Selection, budget: HostBudget) -> PoolResult<StepLog> {
        self.prepare(selection, budget, Schedule::SaveMeanwhile)
    }

    fn prepare(
        &self,
        selection: &Selection,
        budget: HostBudget,
        schedule: Schedule,
    ) -> PoolResult<StepLog> {
        let told = std::mem::take(&mut *self.told.lock().expect("no test has failed"));
        let mut quiesced = self.quiesce();
        quiesced.mark_unused(&told.unused, selection);
        let mut seen = quiesced.survey(selection);
        let budget = |_| budget;
        match quiesced.prepare(selection.clone(), &told.stays, Copies::All, budget, schedule) {
            Ok((prepared, log)) => {
                self.put(Stage::Prepared(prepared));
                seen.add(log);
                Ok(seen)
            }
            Err(Failed { state, error }) => {
                self.put(Stage::Leaving(*state));
                Err(error)
            }
        }
    }

    /// The undo of a save.
    pub(crate) fn remount(&self) -> PoolResult<StepLog> {
        let undone = match self.take() {
            Stage::Leaving(leaving) => leaving.undo(),
            Stage::Prepared(prepared) => prepared.undo(),
            Stage::Quiesced(quiesced) => {
                drop(quiesced);
                return Ok(StepLog::default());
            }
            // As a member that runs already.
            stage @ (Stage::Rest | Stage::Undone(_)) => {
                self.put(stage);
                return Ok(StepLog::default());
            }
            stage => panic!("no pause is under way: {stage:?}"),
        };
        match undone {
            Ok(Undone { done, log, spare }) => {
                self.put(Stage::Undone(spare));
                drop(done);
                Ok(log)
            }
            Err(Failed { state, error }) => {
                self.put(Stage::Leaving(*state));
                Err(error)
            }
        }
    }

    /// The point of no return of a pause.
    pub(crate) fn release_selected(&self) -> PoolResult<StepLog> {
        self.release_rest().map(|moved| moved.log)
    }

    fn take_departing(&self) -> Departing<SimDriver> {
        match self.take() {
            Stage::Prepared(prepared) => prepared.depart(),
            Stage::Departing(departing) => departing,
            stage => panic!("nothing is prepared: {stage:?}"),
        }
    }

    pub(crate) fn release_stage(&self, window: &ByDevice) -> PoolResult<Moved> {
        let mut departing = self.take_departing();
        let moved = departing.release_stage(window);
        self.put(Stage::Departing(departing));
        moved
    }

    /// The end of a pause.
    pub(crate) fn release_rest(&self) -> PoolResult<Moved> {
        self.release_rest_by(Schedule::SaveMeanwhile)
    }

    /// The same, by a schedule.
    pub(crate) fn release_rest_by(&self, rest: Schedule) -> PoolResult<Moved> {
        match self.take_departing().release(rest) {
            Ok((done, moved)) => {
                drop(done);
                Ok(moved)
            }
            Err(Failed { state, error }) => {
                self.put(Stage::Departing(*state));
                Err(error)
            }
        }
    }

    /// Instead of creating, by stages. The first shuts the gate.
    pub(crate) fn restore_stage(&self, allowed: &ByDevice) -> PoolResult<Moved> {
        let mut arriving = match self.take() {
            Stage::Arriving(arriving) => arriving,
            Stage::Rest => self.shut::<FromOffloaded>().arrive(Away::Whole),
            stage => panic!("something else is under way: {stage:?}"),
        };
        let moved = arriving.restore_stage(allowed);
        self.put(Stage::Arriving(arriving));
        moved
    }

    /// The end of it, before imports.
    pub(crate) fn restore_rest(&self, exports_max: usize) -> PoolResult<Moved> {
        let Stage::Arriving(arriving) = self.take() else {
            panic!("nothing comes back by stages");
        };
        match arriving.restore_rest(exports_max) {
            Ok((returning, moved)) => {
                self.put(Stage::Returning(returning));
                Ok(moved)
            }
            Err(Failed { state, error }) => {
                self.put(Stage::Returning(*state));
                Err(error)
            }
        }
    }

    pub(crate) fn create_own(&self, selection: &Selection) -> PoolResult<StepLog> {
        let created = match selection.clone() {
            Selection::SetAside(tags, whose) => {
                self.shut::<FromOpen>().create_own(Aside(tags, whose))
            }
            Selection::Whole => self.shut::<FromOffloaded>().create_own(Away::Whole),
            Selection::Staged(tags) => self.shut::<FromOffloaded>().create_own(Away::Staged(tags)),
            selection @ (Selection::Rest | Selection::Tagged(..) | Selection::Standing(..)) => {
                panic!("no resume is of {selection:?}")
            }
        };
        match created {
            Ok((arriving, log)) => {
                self.put(Stage::Arriving(arriving));
                Ok(log)
            }
            Err(Failed { state, error }) => {
                drop(state);
                Err(error)
            }
        }
    }

    fn with_returning<T>(&self, step: impl FnOnce(&mut Returning<SimDriver>) -> T) -> T {
        let Stage::Returning(mut returning) = self.take() else {
            panic!("no resume is under way");
        };
        let outcome = step(&mut returning);
        self.put(Stage::Returning(returning));
        outcome
    }

    pub(crate) fn restore_own(&self, exports_max: usize) -> PoolResult<StepLog> {
        let Moved { log, copied_bytes, .. } = self.restore_rest(exports_max)?;
        Ok(StepLog { bytes: copied_bytes, ..log })
    }

    pub(crate) fn import_requests(&self) -> Vec<ImportRequest> {
        self.with_returning(|returning| returning.import_requests())
    }

    pub(crate) fn import_batch(
        &self,
        descriptors: HashMap<AllocationId, OwnedFd>,
    ) -> PoolResult<StepLog> {
        let descriptors = descriptors.into_iter().map(|(id, fd)| (id, fd.into())).collect();
        self.with_returning(|returning| returning.import_batch(descriptors))
    }

    pub(crate) fn returning_import(
        &self,
        descriptors: HashMap<AllocationId, Borrowed>,
    ) -> PoolResult<StepLog> {
        self.with_returning(|returning| returning.import_batch(descriptors))
    }

    pub(crate) fn map_imports(&self) -> PoolResult<StepLog> {
        let Stage::Returning(returning) = self.take() else {
            panic!("no resume is under way");
        };
        match returning.map_imports() {
            Ok((restored, log)) => {
                self.put(Stage::Restored(restored));
                Ok(log)
            }
            Err(Failed { state, error }) => {
                self.put(Stage::Returning(*state));
                Err(error)
            }
        }
    }

    /// The undo of a resume.
    pub(crate) fn undo_resume(&self) -> PoolResult<StepLog> {
        let undone = match self.take() {
            Stage::Returning(returning) => returning.undo(),
            Stage::Arriving(arriving) => arriving.undo(),
            Stage::Restored(restored) => restored.undo(),
            // As a member that is paused still.
            Stage::Rest => return Ok(StepLog::default()),
            stage => panic!("no resume is under way: {stage:?}"),
        };
        match undone {
            Ok((done, log)) => {
                drop(done);
                Ok(log)
            }
            Err(Failed { state, error }) => {
                self.put(Stage::Returning(*state));
                Err(error)
            }
        }
    }

    /// The end of a resume, or of an undo. What was imported is mapped by then, where there is any.
    pub(crate) fn commit_resume(&self) -> Vec<OwnedFd> {
        let restored = match self.take() {
            Stage::Restored(restored) => restored,
            Stage::Undone(spare) => return spare,
            Stage::Returning(returning) => match returning.map_imports() {
                Ok((restored, _)) => restored,
                Err(Failed { error, .. }) => panic!("imports are missing: {error}"),
            },
            stage => panic!("no resume is under way: {stage:?}"),
        };
        let (done, spare) = restored.commit();
        drop(done);
        spare
    }

    /// Gives up whatever is under way, as a caller does that has no more to say.
    pub(crate) fn drop_proof(&self) {
        drop(self.take());
    }

    /// The same, by a panic of the thread that holds it.
    pub(crate) fn drop_proof_in_panic(&self) {
        let stage = self.take();
        let ended = std::thread::spawn(move || {
            let _held = stage;
            std::panic::resume_unwind(Box::new(()));
        });
        ended.join().expect_err("it panics");
    }

    /// The context is lost: nothing is put back.
    pub(crate) fn abandon(&self) {
        match self.take() {
            Stage::Leaving(leaving) => leaving.abandon(),
            Stage::Prepared(prepared) => prepared.abandon(),
            Stage::Departing(departing) => departing.abandon(),
            Stage::Arriving(arriving) => arriving.abandon(),
            Stage::Returning(returning) => returning.abandon(),
            Stage::Restored(restored) => restored.abandon(),
            stage => panic!("nothing is under way: {stage:?}"),
        }
    }

    /// What the application says at the next save.
    pub(crate) fn mark_unused(&self, ranges: &[VaRange]) {
        self.told.lock().expect("no test has failed").unused = ranges.to_vec();
    }

    /// What all processes leave in place at the next save.
    pub(crate) fn leave(&self, stays: &[(AllocationId, StayReason)]) {
        self.told.lock().expect("no test has failed").stays = stays.to_vec();
    }
}

// Calls that need all memory to be there.
impl SimPool {
    pub(crate) fn create(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        self.pool.enter().create(size_bytes, prop, class)
    }

    pub(crate) fn map(
        &self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        self.pool.enter().map(range, offset_bytes, handle)
    }

    pub(crate) fn set_access(&self, range: VaRange, access: &[AccessDesc]) -> PoolResult<()> {
        self.pool.enter().set_access(range, access)
    }

    pub(crate) fn pin(&self, range: VaRange, reason: &'static str) -> u64 {
        self.pool.enter().pin(range, reason)
    }

    pub(crate) fn block_allocate(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        accessors: &[DeviceOrdinal],
        class: Class,
    ) -> PoolResult<DeviceAddress> {
        self.pool.enter().block_allocate(size_bytes, prop, accessors, class)
    }

    pub(crate) fn block_open(
        &self,
        handle: VirtualHandle,
        size_bytes: u64,
        accessor: DeviceOrdinal,
    ) -> PoolResult<DeviceAddress> {
        self.pool.enter().block_open(handle, size_bytes, accessor)
    }

    pub(crate) fn export(&self, handle: VirtualHandle) -> PoolResult<Export> {
        self.pool.enter().export(handle)
    }

    pub(crate) fn import(
        &self,
        source: ImportSource,
        lent: Borrowed,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        self.pool.enter().import(source, lent, class)
    }

    pub(crate) fn import_foreign(
        &self,
        fd: BorrowedFd<'_>,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        self.pool.enter().import_foreign(fd, class)
    }

    pub(crate) fn import_held(&self, id: AllocationId, serial: u64) -> Option<VirtualHandle> {
        self.pool.enter().import_held(id, serial)
    }
}

// Calls that give memory up, or ask.
impl SimPool {
    pub(crate) fn release(&self, handle: VirtualHandle) -> PoolResult<()> {
        self.pool.enter_giving_up().release(handle)
    }

    pub(crate) fn retain_at(&self, address: DeviceAddress) -> PoolResult<VirtualHandle> {
        self.pool.enter_giving_up().retain_at(address)
    }

    pub(crate) fn properties(&self, handle: VirtualHandle) -> PoolResult<AllocationProp> {
        self.pool.enter_giving_up().properties(handle)
    }

    pub(crate) fn unmap(&self, range: VaRange) -> PoolResult<()> {
        self.pool.enter_giving_up().unmap(range)
    }

    pub(crate) fn address_free_is_refused(&self, range: VaRange) -> bool {
        self.pool.enter_giving_up().check_address_free(range).is_err()
    }

    pub(crate) fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        self.pool.holdings().range_of(address)
    }

    pub(crate) fn block_identity(
        &self,
        address: DeviceAddress,
    ) -> Option<(AllocationId, u64, u64)> {
        self.pool.enter_giving_up().block_identity(address)
    }

    pub(crate) fn block_close(&self, address: DeviceAddress) -> PoolResult<()> {
        self.pool.enter_giving_up().block_close(address)
    }

    pub(crate) fn block_free(&self, address: DeviceAddress) -> PoolResult<()> {
        self.pool.enter_giving_up().block_free(address)
    }
}
