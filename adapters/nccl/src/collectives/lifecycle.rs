//! Creation and end of communicators.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use tenants::cut::{CommunicatorId, Increment, Lane, Rank, Series};

use super::communicators::Communicator;
use super::{Collectives, NcclResult, Process, group, identity};

/// A communicator that a call makes.
#[derive(Debug)]
pub(super) struct Newcomer {
    id: CommunicatorId,
    /// Taken before the call, where the rank is known by then.
    local: Option<Rank>,
    /// Where NCCL writes the pointer.
    place: usize,
    /// Which communicator shows when it is there, where it cannot itself.
    parent: Option<Arc<Communicator>>,
    /// Its pointer, where it is in the table already.
    inserted: Option<usize>,
}

impl Collectives {
    /// `ncclCommInitRank` and its variants: rank `rank` of `ranks` of the communicator `id`, whose pointer
    /// NCCL writes to `place`. Waits while the rank is held.
    pub fn create<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        (id, rank, ranks): (CommunicatorId, i32, i32),
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let (Ok(rank), Ok(ranks), false) =
            (u32::try_from(rank), u32::try_from(ranks), group::is_inside())
        else {
            // NCCL refuses it, or makes it for itself.
            return call();
        };
        let local = Rank { communicator: id, rank, ranks };
        let newcomer = Newcomer { id, local: Some(local), place, parent: None, inserted: None };
        self.make(process, what, vec![newcomer], call)
    }

    /// `ncclCommInitAll`: all `ranks` of a new communicator, with their pointers one after the other at
    /// `places`.
    pub fn create_all<P: Process>(
        &self,
        process: &P,
        ranks: i32,
        places: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let (Ok(ranks), false) = (u32::try_from(ranks), group::is_inside()) else {
            return call();
        };
        let number = self.made_here.fetch_add(1, Ordering::Relaxed);
        let id = identity::of_local(process.seed(), number);
        let newcomer = |rank: u32| Newcomer {
            id,
            local: Some(Rank { communicator: id, rank, ranks }),
            place: places + rank as usize * size_of::<usize>(),
            parent: None,
            inserted: None,
        };
        self.make(process, "ncclCommInitAll", (0..ranks).map(newcomer).collect(), call)
    }

    /// `ncclCommShrink`: only the ranks that stay call it, so it is the making of a communicator and no
    /// collective of the parent's.
    pub fn shrink<P: Process>(
        &self,
        process: &P,
        parent: usize,
        excluded: &[i32],
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() {
            return call();
        }
        // A revoked parent may still be shrunk, so this does not ask `known`.
        let Some(parent) = self.communicators.find(parent) else {
            return call();
        };
        parent.application_goes_on();
        let local = rank_after_shrinking(&parent, excluded);
        let newcomer = Newcomer {
            id: local.communicator,
            local: Some(local),
            place,
            parent: Some(parent),
            inserted: None,
        };
        self.make(process, "ncclCommShrink", vec![newcomer], call)
    }

    /// `ncclCommSplit`: a collective of the parent's, also for ranks that give no colour and get nothing.
    pub fn split<P: Process>(
        &self,
        process: &P,
        parent: usize,
        color: i32,
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(parent) = self.known(process, parent) else {
            return call();
        };
        parent.application_goes_on();
        let id = identity::of_split(parent.id(), parent.next_split(), color);
        // Negative is NCCL_SPLIT_NOCOLOR. The rank follows from the keys of all others: NCCL knows it later.
        let newcomer = (color >= 0).then(|| Newcomer {
            id,
            local: None,
            place,
            parent: Some(Arc::clone(&parent)),
            inserted: None,
        });
        if group::is_open() {
            let result = call();
            if result.is_accepted() {
                group::gather(|group| {
                    group.increments.push(parent.collective[0].clone());
                    group.newcomers.extend(newcomer);
                    group.touch(parent);
                });
            }
            return result;
        }
        let launch = process.cut().enter("ncclCommSplit", &parent.collective);
        let result = group::inside(call);
        let child = newcomer.and_then(|newcomer| self.arrived(process, newcomer, result));
        let touched: Vec<_> = std::iter::once(Arc::clone(&parent)).chain(child).collect();
        self.settle(process, launch, result, &touched);
        result
    }

    /// `ncclCommFinalize`. Waits while the rank is held.
    pub fn finalize<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(communicator) = self.known(process, pointer) else {
            return call();
        };
        self.end(process, "ncclCommFinalize", &communicator, call)
    }

    /// `ncclCommDestroy`: takes the communicator out of the table first, since its pointer may come again
    /// while the call is on its way back.
    pub fn destroy<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(communicator) = self.known(process, pointer) else {
            self.communicators.remove(pointer);
            return call();
        };
        self.communicators.remove(pointer);
        let is_deferred = group::is_open();
        let result = self.end(process, "ncclCommDestroy", &communicator, call);
        if is_deferred {
            group::gather(|group| group.leaving.push(communicator));
        } else {
            process.cut().remove_rank(communicator.id(), communicator.local.rank);
        }
        result
    }

    fn end<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        communicator: &Arc<Communicator>,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        communicator.application_goes_on();
        if !communicator.begin_end() {
            // The second half of an end that is counted already.
            return group::inside(call);
        }
        let increments = [communicator.increment(process.cut(), Series::End)];
        if group::is_open() {
            let result = call();
            if result.is_accepted() {
                group::gather(|group| group.increments.extend(increments));
            }
            return result;
        }
        let launch = process.cut().enter(what, &increments);
        let result = group::inside(call);
        if result == NcclResult::IN_PROGRESS && what == "ncclCommDestroy" {
            // There is nothing left to ask.
            drop(launch);
        } else {
            self.settle(process, launch, result, std::slice::from_ref(communicator));
        }
        result
    }

    /// `ncclCommAbort`: never held.
    pub fn abort<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() {
            return call();
        }
        let removed = self.communicators.remove(pointer);
        if let Some(communicator) = &removed {
            communicator.application_goes_on();
        }
        let result = group::inside(call);
        if let Some(communicator) = removed {
            process.cut().remove_rank(communicator.id(), communicator.local.rank);
        }
        result
    }

    /// `ncclCommRevoke`: never held. The communicator can only be shrunk or ended afterwards.
    pub fn revoke<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(communicator) = self.known(process, pointer) else {
            return call();
        };
        communicator.revoke();
        let result = group::inside(call);
        process.cut().remove_rank(communicator.id(), communicator.local.rank);
        result
    }

    /// Makes communicators whose ranks in this process are known.
    fn make<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        newcomers: Vec<Newcomer>,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let cut = process.cut();
        let locals = newcomers.iter().filter_map(|newcomer| newcomer.local);
        let increments: Vec<Increment> = locals
            .map(|local| {
                cut.add_rank(local);
                let lane = Lane { communicator: local.communicator, series: Series::Creation };
                Increment { counter: cut.counter(lane, local.rank), launches: 1 }
            })
            .collect();
        if group::is_open() {
            let result = call();
            if result.is_accepted() {
                for newcomer in newcomers {
                    self.expected(process, newcomer, &increments);
                }
            } else {
                for newcomer in &newcomers {
                    leave(process, newcomer);
                }
            }
            return result;
        }
        let launch = cut.enter(what, &increments);
        let result = group::inside(call);
        let touched: Vec<_> = newcomers
            .into_iter()
            .filter_map(|newcomer| {
                let parent = newcomer.parent.clone();
                self.arrived(process, newcomer, result).or(parent)
            })
            .collect();
        self.settle(process, launch, result, &touched);
        result
    }

    /// A group will make `newcomer` at its end. NCCL gives the pointer out now where it can
    /// (`ncclCommInitRankDev` in its `src/init.cc`), and further calls of the group may name it.
    fn expected<P: Process>(&self, process: &P, mut newcomer: Newcomer, increments: &[Increment]) {
        let pointer = process.communicator_at(newcomer.place);
        if let (true, Some(local)) = (pointer != 0, newcomer.local) {
            self.insert(process, pointer, local);
            newcomer.inserted = Some(pointer);
        }
        let rank = newcomer.local.map(|local| local.rank);
        let own =
            increments.iter().filter(|increment| Some(increment.counter.rank()) == rank).cloned();
        group::gather(|group| {
            group.increments.extend(own);
            group.newcomers.push(newcomer);
        });
    }

    /// The call that makes `newcomer` has returned `result`. Returns the communicator if it is there.
    pub(super) fn arrived<P: Process>(
        &self,
        process: &P,
        newcomer: Newcomer,
        result: NcclResult,
    ) -> Option<Arc<Communicator>> {
        if !result.is_accepted() {
            if let Some(pointer) = newcomer.inserted {
                self.communicators.remove(pointer);
            }
            leave(process, &newcomer);
            return None;
        }
        if let Some(pointer) = newcomer.inserted {
            return self.communicators.find(pointer);
        }
        let pointer = process.communicator_at(newcomer.place);
        let is_late = pointer == 0 || newcomer.local.is_none();
        if is_late && result == NcclResult::IN_PROGRESS {
            self.has_non_blocking.store(true, Ordering::Relaxed);
            self.forming.lock().unwrap_or_else(PoisonError::into_inner).push(newcomer);
            return None;
        }
        self.with_rank(process, &newcomer, pointer)
    }

    fn with_rank<P: Process>(
        &self,
        process: &P,
        newcomer: &Newcomer,
        pointer: usize,
    ) -> Option<Arc<Communicator>> {
        if pointer == 0 {
            leave(process, newcomer);
            return None;
        }
        let local = newcomer.local.or_else(|| {
            let (rank, ranks) = process.rank_of(pointer)?;
            let local = Rank { communicator: newcomer.id, rank, ranks };
            process.cut().add_rank(local);
            Some(local)
        });
        Some(self.insert(process, pointer, local?))
    }

    fn insert<P: Process>(&self, process: &P, pointer: usize, local: Rank) -> Arc<Communicator> {
        let communicator = Arc::new(Communicator::new(process.cut(), pointer, local));
        self.communicators.insert(Arc::clone(&communicator));
        communicator
    }

    /// The application has just been told that what went on at `parent` is over: what it made is there,
    /// before the application can use it.
    pub(super) fn formed<P: Process>(
        &self,
        process: &P,
        parent: &Arc<Communicator>,
        state: NcclResult,
    ) {
        let is_child = |newcomer: &mut Newcomer| {
            newcomer.parent.as_ref().is_some_and(|other| Arc::ptr_eq(other, parent))
        };
        let formed: Vec<_> = {
            let mut forming = self.forming.lock().unwrap_or_else(PoisonError::into_inner);
            forming.extract_if(.., is_child).collect()
        };
        for newcomer in formed {
            if state == NcclResult::SUCCESS {
                self.with_rank(process, &newcomer, process.communicator_at(newcomer.place));
            } else {
                leave(process, &newcomer);
            }
        }
    }
}

/// What was taken for a communicator that did not come to be.
fn leave<P: Process>(process: &P, newcomer: &Newcomer) {
    if let Some(local) = newcomer.local {
        process.cut().remove_rank(local.communicator, local.rank);
    }
}

/// Ranks keep their order when some are taken out.
fn rank_after_shrinking(parent: &Communicator, excluded: &[i32]) -> Rank {
    let own = parent.local;
    let out: std::collections::BTreeSet<u32> =
        excluded.iter().filter_map(|rank| u32::try_from(*rank).ok()).collect();
    let count = |below: u32| u32::try_from(out.range(..below).count()).unwrap_or(0);
    Rank {
        communicator: identity::of_shrink(own.communicator, parent.next_shrink(), excluded),
        rank: own.rank - count(own.rank).min(own.rank),
        ranks: own.ranks - count(own.ranks).min(own.ranks),
    }
}
