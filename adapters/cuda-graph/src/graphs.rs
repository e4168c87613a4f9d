//! The increments that a graph launch adds to the counts of the consistent cut.
//!
//! Collectives on a stream under capture launch nothing. Their increments follow the work: capture, graph, executable graph,
//! launch. They also follow copies, child graphs and updates. A process without a collective in its graphs pays one atomic load
//! a call. Bodies of conditional nodes are not followed: the device decides how often they run. A program that captures a
//! collective into a body gets a message ([`Counted`]). A child graph that `cuGraphExecNodeSetParams` exchanges is not followed
//! either: it must have the form of the one before.
//!
//! A program launches the same graphs again and again, a few microseconds each. So every thread remembers the answers that it
//! has got, until something changes, and takes no lock for them.
//!
//! Lock order: `tables` is a leaf.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tenants::cut::Increment;

/// The increments of one graph.
#[derive(Clone, Debug, Default)]
struct Contents {
    own: Vec<Increment>,
    /// The increments of child graphs, by the node: an executable graph can have a child exchanged.
    children: BTreeMap<u64, Vec<Increment>>,
}

impl Contents {
    fn is_empty(&self) -> bool {
        self.own.is_empty() && self.children.values().all(Vec::is_empty)
    }

    /// Returns all increments, merged to one for each counter.
    fn flat(&self) -> Vec<Increment> {
        let mut merged: Vec<Increment> = Vec::new();
        for increment in self.own.iter().chain(self.children.values().flatten()) {
            match merged.iter_mut().find(|known| Arc::ptr_eq(&known.counter, &increment.counter)) {
                Some(known) => known.launches += increment.launches,
                None => merged.push(increment.clone()),
            }
        }
        merged
    }
}

#[derive(Debug)]
struct Executable {
    contents: Contents,
    flat: Vec<Increment>,
}

impl Executable {
    fn new(contents: Contents) -> Self {
        let flat = contents.flat();
        Self { contents, flat }
    }
}

#[derive(Debug, Default)]
struct Tables {
    /// The increments by the driver's number of the capture.
    captures: HashMap<u64, Vec<Increment>>,
    /// Graphs by the driver's value; only those that hold increments.
    graphs: HashMap<u64, Contents>,
    executables: HashMap<u64, Executable>,
    /// Graphs that are parts of others, by the driver's value.
    bodies: HashSet<u64>,
}

/// The treatment of collectives that a capture has recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Each launch counts them.
    All,
    /// They are in a part of a graph whose launches are not counted.
    NotInBody,
}

/// The graphs of this process that launch work which waits for other ranks.
#[derive(Debug, Default)]
pub struct Graphs {
    /// Has there ever been such a graph?
    is_used: AtomicBool,
    /// Grows with each change of `tables`, before the lock is released.
    changes: AtomicU64,
    tables: RwLock<Tables>,
}

/// The facts that a thread remembers of one executable graph.
#[derive(Clone, Debug)]
struct Remembered {
    /// The value of [`Graphs::changes`] when the tables were read.
    changes: u64,
    executable: u64,
    increments: Option<Rc<[Increment]>>,
}

/// The number of graphs that a thread remembers. A large model has some 60 to 100 piecewise graphs.
const REMEMBERED_MAX: usize = 128;

thread_local! {
    /// The slots, by the executable's value. A process has one [`Graphs`].
    static REMEMBERED: RefCell<[Option<Remembered>; REMEMBERED_MAX]> =
        const { RefCell::new([const { None }; REMEMBERED_MAX]) };
}

/// Returns the slot in which `executable` is remembered. The driver's values are addresses, alike in their lowest bits.
fn slot(executable: u64) -> usize {
    let mixed = executable.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    // CAST: less than the number of slots.
    (mixed % REMEMBERED_MAX as u64) as usize
}

impl Graphs {
    fn read(&self) -> Option<RwLockReadGuard<'_, Tables>> {
        let is_used = self.is_used.load(Ordering::Acquire);
        is_used.then(|| self.tables.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> Option<RwLockWriteGuard<'_, Tables>> {
        let is_used = self.is_used.load(Ordering::Acquire);
        is_used.then(|| {
            let tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
            // A caller that reads before the change reads under the lock, and remembers an answer that was right then. Callers
            // that have this number already must see the change that follows.
            self.changes.fetch_add(1, Ordering::Release);
            tables
        })
    }

    /// Is there anything to follow? If not, no other function here does anything.
    #[inline]
    pub fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    /// Records that `capture` has recorded these launches.
    pub fn recorded(&self, capture: u64, increments: Vec<Increment>) {
        self.is_used.store(true, Ordering::Release);
        if let Some(mut tables) = self.write() {
            tables.captures.entry(capture).or_default().extend(increments);
        }
    }

    /// Records that `capture` has ended, and that `graph` holds its work; `None` after a failure. Other increments of the graph
    /// stay only if it `had_other_work`. Returns whether its launches will be counted.
    #[doc(alias = "cuStreamEndCapture")]
    pub fn capture_ended(&self, capture: u64, graph: Option<u64>, had_other_work: bool) -> Counted {
        let Some(mut tables) = self.write() else { return Counted::All };
        let increments = tables.captures.remove(&capture).unwrap_or_default();
        let Some(graph) = graph else { return Counted::All };
        if !had_other_work {
            tables.graphs.remove(&graph);
            tables.bodies.remove(&graph);
        }
        if increments.is_empty() {
            return Counted::All;
        }
        tables.graphs.entry(graph).or_default().own.extend(increments);
        if tables.bodies.contains(&graph) { Counted::NotInBody } else { Counted::All }
    }

    /// Records that `executable` was made from `graph`.
    #[doc(alias = "cuGraphInstantiate")]
    pub fn instantiated(&self, executable: u64, graph: u64) {
        let Some(mut tables) = self.write() else { return };
        let contents = tables.graphs.get(&graph).filter(|contents| !contents.is_empty()).cloned();
        match contents {
            Some(contents) => {
                tables.executables.insert(executable, Executable::new(contents));
            }
            None => {
                tables.executables.remove(&executable);
            }
        }
    }

    /// Records that `executable` now does the work of `graph`.
    #[doc(alias = "cuGraphExecUpdate")]
    pub fn updated(&self, executable: u64, graph: u64) {
        self.instantiated(executable, graph);
    }

    /// Records that `copy` is a copy of `original`. The nodes of a copy have other values, so the increments of children become
    /// the copy's own.
    #[doc(alias = "cuGraphClone")]
    pub fn cloned(&self, copy: u64, original: u64) {
        let Some(mut tables) = self.write() else { return };
        let own = tables.graphs.get(&original).map(Contents::flat).unwrap_or_default();
        if own.is_empty() {
            tables.graphs.remove(&copy);
        } else {
            tables.graphs.insert(copy, Contents { own, children: BTreeMap::new() });
        }
    }

    /// Records that `node` of `graph` stands for a copy of `child`.
    #[doc(alias = "cuGraphAddChildGraphNode")]
    pub fn child_added(&self, graph: u64, node: u64, child: u64) {
        let Some(mut tables) = self.write() else { return };
        let increments = tables.graphs.get(&child).map(Contents::flat).unwrap_or_default();
        if !increments.is_empty() {
            tables.graphs.entry(graph).or_default().children.insert(node, increments);
        }
    }

    /// Records that `node` of `executable` now does the work of `child`.
    #[doc(alias = "cuGraphExecChildGraphNodeSetParams")]
    pub fn child_replaced(&self, executable: u64, node: u64, child: u64) {
        let Some(mut tables) = self.write() else { return };
        let increments = tables.graphs.get(&child).map(Contents::flat).unwrap_or_default();
        let known = tables.executables.remove(&executable);
        let mut contents = known.map(|known| known.contents).unwrap_or_default();
        contents.children.insert(node, increments);
        if !contents.is_empty() {
            tables.executables.insert(executable, Executable::new(contents));
        }
    }

    /// Runs `destroy`, which ends `graph` and returns whether it has. Executables made from the graph stay.
    ///
    /// The tables forget the value first: once the driver has released it, another thread may get it for a graph of its own.
    #[doc(alias = "cuGraphDestroy")]
    pub fn destroy_graph(&self, graph: u64, destroy: impl FnOnce() -> bool) {
        let taken = self.write().and_then(|mut tables| {
            tables.bodies.remove(&graph);
            tables.graphs.remove(&graph)
        });
        if destroy() {
            return;
        }
        if let (Some(contents), Some(mut tables)) = (taken, self.write()) {
            tables.graphs.entry(graph).or_insert(contents);
        }
    }

    /// Runs `destroy`, which ends `executable` and returns whether it has; otherwise as [`Self::destroy_graph`].
    #[doc(alias = "cuGraphExecDestroy")]
    pub fn destroy_executable(&self, executable: u64, destroy: impl FnOnce() -> bool) {
        let taken = self.write().and_then(|mut tables| tables.executables.remove(&executable));
        if destroy() {
            return;
        }
        if let (Some(known), Some(mut tables)) = (taken, self.write()) {
            tables.executables.entry(executable).or_insert(known);
        }
    }

    /// Records that `graph` is the body of a conditional node, or was moved into another graph. Work captured into it from now
    /// on is launched by a graph whose increments are known already. A body ends unseen with the graph that holds it. Its value
    /// counts as a body's until a new capture has it.
    #[doc(alias = "cuGraphAddNode")]
    pub fn is_body(&self, graph: u64) {
        // Recorded even while nothing is followed yet: the body exists before a collective is captured into it.
        self.tables.write().unwrap_or_else(PoisonError::into_inner).bodies.insert(graph);
    }

    /// Returns the increments that a launch of `executable` adds; `None` when there are none.
    #[doc(alias = "cuGraphLaunch")]
    #[inline]
    pub fn increments_of(&self, executable: u64) -> Option<Rc<[Increment]>> {
        if self.is_used() { self.remembered_increments_of(executable) } else { None }
    }

    fn remembered_increments_of(&self, executable: u64) -> Option<Rc<[Increment]>> {
        let known = REMEMBERED.try_with(|remembered| {
            let remembered = remembered.borrow();
            let known = remembered[slot(executable)].as_ref()?;
            let is_fresh = known.changes == self.changes.load(Ordering::Acquire);
            (is_fresh && known.executable == executable).then(|| known.increments.clone())
        });
        if let Ok(Some(increments)) = known {
            return increments;
        }
        let (changes, increments) = {
            let tables = self.read()?;
            // No change is under way while this lock is held.
            let changes = self.changes.load(Ordering::Acquire);
            (changes, tables.executables.get(&executable).map(|known| Rc::from(&known.flat[..])))
        };
        let fresh = Remembered { changes, executable, increments: increments.clone() };
        let _kept = REMEMBERED.try_with(|remembered| {
            remembered.borrow_mut()[slot(executable)] = Some(fresh);
        });
        increments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tenants::cut::{CommunicatorId, Cut, Lane, Series};

    const CAPTURE: u64 = 1;
    const GRAPH: u64 = 10;
    const EXECUTABLE: u64 = 20;

    struct Fixture {
        cut: Cut,
        graphs: Graphs,
    }

    impl Fixture {
        fn new() -> Self {
            Self { cut: Cut::default(), graphs: Graphs::default() }
        }

        fn increment(&self, communicator: u128) -> Increment {
            let communicator = CommunicatorId(communicator);
            let lane = Lane { communicator, series: Series::Collectives };
            Increment { counter: self.cut.counter(lane, 0), launches: 1 }
        }

        /// A graph that holds one collective of each of `communicators`.
        fn graph(&self, graph: u64, communicators: &[u128]) {
            for communicator in communicators {
                self.graphs.recorded(CAPTURE, vec![self.increment(*communicator)]);
            }
            self.graphs.capture_ended(CAPTURE, Some(graph), false);
        }

        /// Launches by communicator.
        fn launches(&self, executable: u64) -> Vec<(u128, u64)> {
            let increments = self.graphs.increments_of(executable);
            let mut launches: Vec<_> = increments
                .iter()
                .flat_map(|increments| increments.iter())
                .map(|increment| (increment.counter.lane().communicator.0, increment.launches))
                .collect();
            launches.sort_unstable();
            launches
        }
    }

    #[test]
    fn recorded_collectives_count_at_each_launch_merged_by_communicator() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[5, 6, 5]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 2), (6, 1)]);
    }

    #[test]
    fn an_executable_outlives_its_graph_and_its_value_may_come_again() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[5]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        fixture.graphs.destroy_graph(GRAPH, || true);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 1)]);
        fixture.graphs.destroy_executable(EXECUTABLE, || true);
        assert_eq!(fixture.launches(EXECUTABLE), []);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), [], "the graph is gone");
    }

    #[test]
    fn a_value_that_another_thread_gets_while_it_ends_keeps_what_that_thread_made_of_it() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[5]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        // The driver gives the values out again before it returns.
        fixture.graphs.destroy_graph(GRAPH, || {
            fixture.graph(GRAPH, &[6, 6]);
            true
        });
        fixture.graphs.destroy_executable(EXECUTABLE, || {
            fixture.graphs.instantiated(EXECUTABLE, GRAPH);
            true
        });
        assert_eq!(fixture.launches(EXECUTABLE), [(6, 2)]);
    }

    #[test]
    fn what_the_driver_does_not_end_is_as_before() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[5]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        fixture.graphs.destroy_executable(EXECUTABLE, || false);
        fixture.graphs.destroy_graph(GRAPH, || false);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 1)]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 1)]);
    }

    #[test]
    fn a_collective_captured_into_the_body_of_a_conditional_node_is_told_of() {
        let fixture = Fixture::new();
        let body = 14;
        fixture.graphs.is_body(body);
        assert_eq!(fixture.graphs.capture_ended(CAPTURE, Some(body), true), Counted::All, "none");
        fixture.graphs.recorded(CAPTURE, vec![fixture.increment(5)]);
        let ended = fixture.graphs.capture_ended(CAPTURE, Some(body), true);
        assert_eq!(ended, Counted::NotInBody);
        // The driver may give its value to a graph that is no body.
        fixture.graphs.recorded(CAPTURE, vec![fixture.increment(5)]);
        assert_eq!(fixture.graphs.capture_ended(CAPTURE, Some(body), false), Counted::All);
        fixture.graphs.is_body(body);
        fixture.graphs.destroy_graph(body, || true);
        fixture.graphs.recorded(CAPTURE, vec![fixture.increment(5)]);
        assert_eq!(fixture.graphs.capture_ended(CAPTURE, Some(body), true), Counted::All);
    }

    #[test]
    fn what_a_thread_remembers_ends_with_a_change_that_another_makes() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[5]);
        for round in 0..100 {
            fixture.graphs.instantiated(EXECUTABLE, GRAPH);
            assert_eq!(fixture.launches(EXECUTABLE), [(5, 1)], "{round}");
            // These are many more than a thread remembers, and some share a slot.
            for executable in 0..2 * REMEMBERED_MAX as u64 {
                assert_eq!(fixture.launches(1000 + executable), [], "{round}");
            }
            std::thread::scope(|scope| {
                scope.spawn(|| fixture.graphs.destroy_executable(EXECUTABLE, || true));
            });
            assert_eq!(fixture.launches(EXECUTABLE), [], "{round}");
        }
    }

    #[test]
    fn a_failed_capture_leaves_nothing() {
        let fixture = Fixture::new();
        fixture.graphs.recorded(CAPTURE, vec![fixture.increment(5)]);
        fixture.graphs.capture_ended(CAPTURE, None, false);
        fixture.graph(GRAPH, &[]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), []);
    }

    #[test]
    fn a_capture_into_a_graph_with_other_work_adds_and_any_other_starts_anew() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[5]);
        fixture.graphs.recorded(CAPTURE, vec![fixture.increment(6)]);
        fixture.graphs.capture_ended(CAPTURE, Some(GRAPH), true);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 1), (6, 1)]);
        fixture.graph(GRAPH, &[7]);
        fixture.graphs.updated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), [(7, 1)]);
    }

    #[test]
    fn entries_go_with_copies_child_graphs_and_their_exchange() {
        const NODE: u64 = 30;
        let fixture = Fixture::new();
        let (child, other, copy) = (11, 12, 13);
        fixture.graph(child, &[5]);
        fixture.graph(other, &[6, 6]);
        fixture.graph(GRAPH, &[7]);
        fixture.graphs.child_added(GRAPH, NODE, child);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 1), (7, 1)]);
        fixture.graphs.child_replaced(EXECUTABLE, NODE, other);
        assert_eq!(fixture.launches(EXECUTABLE), [(6, 2), (7, 1)]);
        fixture.graphs.cloned(copy, GRAPH);
        fixture.graphs.instantiated(EXECUTABLE, copy);
        assert_eq!(fixture.launches(EXECUTABLE), [(5, 1), (7, 1)]);
    }

    #[test]
    fn a_graph_that_the_driver_would_not_destroy_is_as_before() {
        let fixture = Fixture::new();
        fixture.graph(GRAPH, &[7]);
        fixture.graphs.instantiated(EXECUTABLE, GRAPH);
        fixture.graphs.destroy_executable(EXECUTABLE, || {
            assert!(fixture.launches(EXECUTABLE).is_empty());
            false
        });
        assert_eq!(fixture.launches(EXECUTABLE), [(7, 1)]);
        fixture.graphs.destroy_graph(GRAPH, || false);
        fixture.graphs.instantiated(EXECUTABLE + 1, GRAPH);
        assert_eq!(fixture.launches(EXECUTABLE + 1), [(7, 1)]);
    }
}
