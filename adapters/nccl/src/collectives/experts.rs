//! NCCL EP (`libnccl_ep.so`): exchanges between experts, over a communicator of NCCL's.
//!
//! | call | counts on |
//! | --- | --- |
//! | `ncclEpCreateGroup` | the communicator's collectives, as all its ranks must make it |
//! | `ncclEpDispatch`, `ncclEpCombine` | the group's exchanges, which all ranks make in the same order |
//! | `ncclEpGroupDestroy`, `ncclEpInitHandle`, `ncclEpCreateHandle`, `ncclEpUpdateHandle` | nothing of their own |
//!
//! Whether the calls of the last row need other ranks depends on mode and version. If they do, they wait by NCCL's public
//! functions, which are counted already (`ll_resize_rdma_buffer`, `ncclEpUpdateHandle` and `ncclEpGroupDestroy` in
//! `contrib/nccl_ep/nccl_ep.cc` of NCCL 2.30.7). Ranks may make different numbers of handles. To count these calls as well
//! would keep such ranks from a cut. `ncclEpComplete` is not hooked: it waits for the data of exchanges, and at a cut all ranks
//! have launched the same number of exchanges.
//!
//! An exchange is launched by its call, also between `ncclGroupStart` and `ncclGroupEnd`.
//!
//! Lock order: `groups` and `handles` are leaves.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tenants::cut::Series;
use vmm_pool::sync::lock;

use super::communicators::{Communicator, Derived};
use super::{Collectives, NcclResult, Process, group};

/// The groups and handles of this process, by the pointers that NCCL EP gave out for them.
#[derive(Debug, Default)]
pub(super) struct Experts {
    groups: Mutex<HashMap<usize, ExpertGroup>>,
    /// The group of each handle.
    handles: Mutex<HashMap<usize, ExpertGroup>>,
}

#[derive(Clone, Debug)]
struct ExpertGroup {
    communicator: Arc<Communicator>,
    number: u32,
}

/// Removes the object `pointer` of NCCL EP from `of`. Puts it back if NCCL EP refuses to end it.
fn ended(
    of: &Mutex<HashMap<usize, ExpertGroup>>,
    pointer: usize,
    call: impl FnOnce() -> NcclResult,
) -> NcclResult {
    // It is removed before NCCL EP frees the value, which another thread may then get.
    let group = lock(of).remove(&pointer);
    let result = call();
    if let (Some(group), false) = (group, result.is_accepted()) {
        lock(of).entry(pointer).or_insert(group);
    }
    result
}

impl Collectives {
    /// `ncclEpCreateGroup` over `communicator`: a collective of all its ranks. NCCL EP writes the group's pointer to
    /// `place`. Waits while the rank is held.
    pub fn make_expert_group<P: Process>(
        &self,
        process: &P,
        communicator: usize,
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(known) = self.known(process, communicator) else {
            return call();
        };
        let number = known.numbers.take(Derived::Experts);
        let result =
            self.launched(process, "ncclEpCreateGroup", (&known, &known.collective), None, call);
        let made = process.communicator_at(place);
        match u32::try_from(number) {
            Ok(number) if result == NcclResult::SUCCESS && made != 0 => {
                let group = ExpertGroup { communicator: known, number };
                lock(&self.experts.groups).insert(made, group);
            }
            _ => known.numbers.give_back(Derived::Experts),
        }
        result
    }

    /// `ncclEpGroupDestroy`.
    pub fn end_expert_group(
        &self,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        ended(&self.experts.groups, pointer, call)
    }

    /// `ncclEpInitHandle` and `ncclEpCreateHandle`: makes a handle of the group at `pointer`. NCCL EP writes the handle's
    /// pointer to `place`.
    pub fn make_expert_handle<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let result = call();
        let group = lock(&self.experts.groups).get(&pointer).cloned();
        let made = process.communicator_at(place);
        if let (Some(group), true) = (group, result.is_accepted() && made != 0) {
            lock(&self.experts.handles).insert(made, group);
        }
        result
    }

    /// `ncclEpHandleDestroy`.
    pub fn end_expert_handle(
        &self,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        ended(&self.experts.handles, pointer, call)
    }

    /// `ncclEpDispatch` or `ncclEpCombine` with the handle at `pointer`, on a stream. Waits while the rank is held.
    pub fn exchange<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        pointer: usize,
        stream: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() {
            return call();
        }
        let Some(ExpertGroup { communicator, number }) =
            lock(&self.experts.handles).get(&pointer).cloned()
        else {
            return call();
        };
        let series = Series::Expert { group: number };
        let increments = [communicator.increment(process.cut(), series)];
        let capture = process.capture_of(stream);
        self.launched(process, what, (&communicator, &increments), capture, call)
    }
}
