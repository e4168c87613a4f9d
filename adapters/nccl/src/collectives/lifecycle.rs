//! Creation and end of communicators.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tenants::cut::{CommunicatorId, Counter, Increment, Lane, Rank, Series};

use super::communicators::{Communicator, Derived, UseLeft};
use super::{Collectives, NcclResult, Process, group, identity, turned_back};

/// The longest wait of a thread that ends a communicator for threads that were held at calls on it. Those threads only have to
/// end a group in failure, which waits for nobody.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The most identities that are remembered after one use. If identities are used again, it is always the same one.
const USED_MAX: usize = 4096;

/// A communicator that a call makes.
#[derive(Debug)]
pub(super) struct Newcomer {
    id: CommunicatorId,
    /// The rank, taken before the call if it is known by then.
    local: Option<Rank>,
    /// The place that NCCL writes the pointer to.
    place: usize,
    /// The communicator that shows when the new one exists, if the new one cannot show it itself.
    parent: Option<Arc<Communicator>>,
    /// The pointer of the new communicator, if it is in the table already.
    inserted: Option<usize>,
    making: Making,
}

/// The use or number that a creation has taken, and gives back if it fails.
#[derive(Clone, Copy, Debug)]
enum Making {
    /// One more use of an identity by a rank.
    Use(CommunicatorId, u32),
    /// A number of its parent.
    Of(Derived),
    /// Nothing.
    Plain,
}

impl Newcomer {
    fn new(id: CommunicatorId, place: usize, making: Making) -> Self {
        Self { id, local: None, place, parent: None, inserted: None, making }
    }

    /// Returns the seat that must still be taken for the creation: the parent's, unless that was left already.
    pub(super) fn needed(&self) -> Option<Arc<Counter>> {
        let parent = self.parent.as_ref()?;
        (parent.use_left() == UseLeft::All).then(|| parent.seat().clone())
    }
}

impl Collectives {
    /// `ncclCommInitRank` and its variants: makes rank `rank` of `ranks` of the communicator `id`. NCCL writes its pointer to
    /// `place`. Waits while the rank is held.
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
            // NCCL refuses the call, or makes the communicator for itself.
            return call();
        };
        self.make(process, what, vec![self.newcomer((id, rank, ranks), place)], call)
    }

    /// Makes a newcomer: a rank of a communicator that is named by `ncclUniqueId`s.
    fn newcomer(&self, (first, rank, ranks): (CommunicatorId, u32, u32), place: usize) -> Newcomer {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        if uses.len() >= USED_MAX {
            uses.retain(|_, uses| *uses > 1);
        }
        let uses = uses.entry((first, rank)).or_default();
        let id = if *uses == 0 { first } else { identity::of_reuse(first, *uses) };
        *uses += 1;
        let local = Some(Rank { communicator: id, rank, ranks });
        Newcomer { local, ..Newcomer::new(id, place, Making::Use(first, rank)) }
    }

    /// `ncclCommInitAll`: makes all `ranks` of a new communicator, with their pointers one after the other at `places`.
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
        let newcomer = |rank: u32| {
            let place = places + rank as usize * size_of::<usize>();
            let local = Some(Rank { communicator: id, rank, ranks });
            Newcomer { local, ..Newcomer::new(id, place, Making::Plain) }
        };
        self.make(process, "ncclCommInitAll", (0..ranks).map(newcomer).collect(), call)
    }

    /// `ncclCommShrink`: only the ranks that stay call it. So it makes a communicator, and is no collective of the parent. If
    /// it `aborts` the work under way on the parent, ranks may have launched different numbers of collectives. Then this rank
    /// leaves its seat of the parent.
    pub fn shrink<P: Process>(
        &self,
        process: &P,
        (parent, aborts): (usize, bool),
        excluded: &[i32],
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() {
            return call();
        }
        // A revoked parent may still be shrunk, so this does not call `known`.
        let Some(parent) = self.communicators.find(parent) else {
            return call();
        };
        parent.application_goes_on();
        if aborts && parent.use_left() == UseLeft::All {
            // It comes before any wait: a hold must not wait until the parent's ranks have launched the same.
            parent.give_up();
            process.cut().give_up_rank(parent.id(), parent.local.rank);
        }
        let local = rank_after_shrinking(&parent, excluded);
        let newcomer = Newcomer {
            local: Some(local),
            parent: Some(parent),
            ..Newcomer::new(local.communicator, place, Making::Of(Derived::Shrink))
        };
        self.make(process, "ncclCommShrink", vec![newcomer], call)
    }

    /// `ncclCommGrow` to `ranks` ranks. Ranks of the `parent` keep their numbers, and know the new communicator by the parent.
    /// Other ranks have no parent, get their `rank`, and know the new communicator by `id`. The rank that has both tells the
    /// cut that the two are one.
    pub fn grow<P: Process>(
        &self,
        process: &P,
        (parent, ranks): (usize, i32),
        (id, rank): (Option<CommunicatorId>, i32),
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        const WHAT: &str = "ncclCommGrow";
        let (Ok(ranks), false) = (u32::try_from(ranks), group::is_inside()) else {
            return call();
        };
        if parent == 0 {
            let (Some(id), Ok(rank)) = (id, u32::try_from(rank)) else {
                return call();
            };
            return self.make(process, WHAT, vec![self.newcomer((id, rank, ranks), place)], call);
        }
        let Some(parent) = self.known(process, parent) else {
            return call();
        };
        parent.application_goes_on();
        let number = parent.numbers.take(Derived::Grow);
        let grown = identity::of_grow(parent.id(), number, ranks);
        let newcomer = Newcomer {
            local: Some(Rank { communicator: grown, rank: parent.local.rank, ranks }),
            parent: Some(parent),
            ..Newcomer::new(grown, place, Making::Of(Derived::Grow))
        };
        if let Some(id) = id {
            process.cut().is_also(grown, id);
        }
        self.make(process, WHAT, vec![newcomer], call)
    }

    /// `ncclCommSplit`: a collective of the parent, also for ranks that give no colour and get no communicator.
    pub fn split<P: Process>(
        &self,
        process: &P,
        parent: usize,
        color: i32,
        place: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        // A revoked parent may still be split. A hold does not count that split as a collective.
        let counted = self.known(process, parent).is_some();
        let found = if group::is_inside() { None } else { self.communicators.find(parent) };
        let Some(parent) = found else {
            return call();
        };
        parent.application_goes_on();
        let number = parent.numbers.take(Derived::Split);
        let id = identity::of_split(parent.id(), number, color);
        // A negative value is NCCL_SPLIT_NOCOLOR. The rank follows from the keys of all others: NCCL knows it later.
        let newcomer = (color >= 0).then(|| Newcomer {
            parent: Some(Arc::clone(&parent)),
            ..Newcomer::new(id, place, Making::Plain)
        });
        let increments: &[Increment] = if counted { &parent.collective } else { &[] };
        if group::is_open() {
            let result = call();
            if result.is_accepted() {
                group::gather(|group| {
                    group.increments.extend_from_slice(increments);
                    group.rare().newcomers.extend(newcomer);
                    group.rare().splits.push(Arc::clone(&parent));
                    if counted {
                        group.touch(&parent);
                    }
                });
            } else {
                parent.numbers.give_back(Derived::Split);
            }
            return result;
        }
        let entered =
            counted.then(|| process.cut().enter_if_there("ncclCommSplit", increments, &[]));
        let launch = match entered.transpose() {
            Ok(launch) => launch,
            Err(withdrawal) => {
                parent.numbers.give_back(Derived::Split);
                return turned_back(process, "ncclCommSplit", withdrawal);
            }
        };
        let result = group::inside(call);
        if !result.is_accepted() {
            parent.numbers.give_back(Derived::Split);
        }
        let child = newcomer.and_then(|newcomer| self.arrived(process, newcomer, result));
        let touched: Vec<_> = std::iter::once(Arc::clone(&parent)).chain(child).collect();
        match launch {
            Some(launch) => self.settle(process, launch, result, &touched),
            None => self.note_progress(result, &touched),
        }
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

    /// `ncclCommDestroy`: takes the communicator out of the table first, because another communicator may get its pointer while
    /// the call returns.
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
        if is_deferred && result.is_accepted() {
            group::gather(|group| group.rare().leaving.push(communicator));
        } else {
            self.left(process, communicator, result);
        }
        result
    }

    /// Records the end of a communicator that was taken out of the table, or NCCL's refusal to end it.
    pub(super) fn left<P: Process>(
        &self,
        process: &P,
        communicator: Arc<Communicator>,
        result: NcclResult,
    ) {
        if result.is_accepted() {
            process.cut().remove_rank(communicator.id(), communicator.local.rank);
        } else if !communicator.seat().is_gone() {
            communicator.undo_end();
            self.communicators.put_back(communicator);
        }
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
            // This is the second half of an end that is counted already.
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
        let seat = std::slice::from_ref(communicator.seat());
        let launch = match process.cut().enter_if_there(what, &increments, seat) {
            Ok(launch) => launch,
            Err(withdrawal) => return turned_back(process, what, withdrawal),
        };
        let result = group::inside(call);
        if !result.is_accepted() {
            communicator.undo_end();
        }
        if result == NcclResult::IN_PROGRESS && what == "ncclCommDestroy" {
            // There is nothing left to query.
            drop(launch);
        } else {
            self.settle(process, launch, result, std::slice::from_ref(communicator));
        }
        result
    }

    /// `ncclCommAbort`: never held. Calls of threads that are held at launches on the communicator are refused before NCCL
    /// frees it.
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
        if let Some(communicator) = removed {
            communicator.application_goes_on();
            process.cut().give_up_rank(communicator.id(), communicator.local.rank);
            if !process.cut().wait_for_withdrawals(communicator.id(), WITHDRAWAL_TIMEOUT) {
                process.note(
                    "ncclCommAbort went on although a thread that was held before a call on the same communicator had \
                     not left it within 5 s",
                );
            }
        }
        group::inside(call)
    }

    /// `ncclCommRevoke`: never held. Other communicators can be made from this one afterwards, and it can be ended. Calls of
    /// threads that are held at launches on it are refused, as NCCL would refuse them.
    pub fn revoke<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(communicator) = self.known(process, pointer) else {
            return call();
        };
        communicator.application_goes_on();
        let result = group::inside(call);
        if result.is_accepted() {
            communicator.revoke();
            process.cut().give_up_rank(communicator.id(), communicator.local.rank);
        }
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
                    self.leave(process, newcomer);
                }
            }
            return result;
        }
        let needed: Vec<_> = newcomers.iter().filter_map(Newcomer::needed).collect();
        let launch = match cut.enter_if_there(what, &increments, &needed) {
            Ok(launch) => launch,
            Err(withdrawal) => {
                for newcomer in &newcomers {
                    self.leave(process, newcomer);
                }
                return turned_back(process, what, withdrawal);
            }
        };
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

    /// Records that a group will make `newcomer` at its end. NCCL writes the pointer now if it can (`ncclCommInitRankDev` in
    /// its `src/init.cc`), and further calls of the group may name it.
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
            group.rare().newcomers.push(newcomer);
        });
    }

    /// Records that the call that makes `newcomer` has returned `result`. Returns the communicator if it exists.
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
            self.leave(process, &newcomer);
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
            self.leave(process, newcomer);
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

    /// Records that the application has just heard that the call on `parent` is over. The new communicators are in the table
    /// before the application can use them.
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
                self.leave(process, &newcomer);
            }
        }
    }

    /// Gives back the rank, use or number of a communicator that was not made.
    fn leave<P: Process>(&self, process: &P, newcomer: &Newcomer) {
        if let Some(local) = newcomer.local {
            process.cut().remove_rank(local.communicator, local.rank);
        }
        match (newcomer.making, &newcomer.parent) {
            (Making::Use(first, rank), _) => {
                let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(uses) = uses.get_mut(&(first, rank)) {
                    *uses = uses.saturating_sub(1);
                }
            }
            (Making::Of(what), Some(parent)) => parent.numbers.give_back(what),
            (Making::Of(_) | Making::Plain, _) => {}
        }
    }
}

/// Returns the rank after a shrink. Ranks keep their order when some are excluded.
fn rank_after_shrinking(parent: &Communicator, excluded: &[i32]) -> Rank {
    let own = parent.local;
    let out: std::collections::BTreeSet<u32> =
        excluded.iter().filter_map(|rank| u32::try_from(*rank).ok()).collect();
    let count = |below: u32| u32::try_from(out.range(..below).count()).unwrap_or(0);
    Rank {
        communicator: identity::of_shrink(
            own.communicator,
            parent.numbers.take(Derived::Shrink),
            excluded,
        ),
        rank: own.rank - count(own.rank).min(own.rank),
        ranks: own.ranks - count(own.ranks).min(own.ranks),
    }
}
