//! Graphs that others hold as nodes.

use std::ops::Range;

use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::Work;

use super::{Captures, Recorded};
use crate::abi::Coded;
use crate::sim::{Sim, lock};

const NODE_FIRST: u64 = 0x6800_0000;
const NODE_STEP: u64 = 0x10;

/// The child graphs of a graph, by node.
#[derive(Clone, Debug, Default)]
pub(super) struct Children {
    /// Copies: which part of the work theirs is.
    copied: Vec<(u64, Range<usize>)>,
    /// Those that belong to the graph, and can be added to: their work comes last.
    moved: Vec<(u64, u64)>,
}

impl Captures {
    /// What a graph does, its own children's work too.
    pub(super) fn all_of(&self, graph: u64) -> Coded<Recorded> {
        let mut all = self.graphs.get(&graph).cloned().ok_or(DriverCode::INVALID_VALUE)?;
        for (node, child) in std::mem::take(&mut all.children.moved) {
            all.add_copy(node, self.all_of(child)?.work);
        }
        Ok(all)
    }

    /// Takes a graph that nobody owns, and those that it owns.
    pub(super) fn remove_graph(&mut self, graph: u64) -> Coded<Vec<Recorded>> {
        let mut all = self.graphs.values().flat_map(|other| &other.children.moved);
        if all.any(|(_, child)| *child == graph) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let mut removed = vec![self.graphs.remove(&graph).ok_or(DriverCode::INVALID_VALUE)?];
        let mut index = 0;
        while let Some(parent) = removed.get(index) {
            let children: Vec<u64> =
                parent.children.moved.iter().map(|(_, child)| *child).collect();
            removed.extend(children.iter().filter_map(|child| self.graphs.remove(child)));
            index += 1;
        }
        Ok(removed)
    }
}

impl Recorded {
    fn add_copy(&mut self, node: u64, work: Vec<Work>) {
        let start = self.work.len();
        self.work.extend(work);
        self.children.copied.push((node, start..self.work.len()));
    }
}

impl Sim {
    /// A graph that does nothing.
    pub(crate) fn create_graph(&self) -> u64 {
        let mut captures = lock(&self.captures);
        let id = captures.next_value();
        captures.graphs.insert(id, Recorded::default());
        id
    }

    /// A node of `graph` that does nothing.
    pub(crate) fn add_empty(&self, graph: u64) -> Coded<u64> {
        let mut captures = lock(&self.captures);
        captures.graphs.get(&graph).ok_or(DriverCode::INVALID_VALUE)?;
        Ok(captures.next_node())
    }

    /// A node of `graph` that does what `child` does: now, or, where it is `moved`, what it does when `graph` becomes an
    /// executable.
    pub(crate) fn add_child(&self, graph: u64, child: u64, moved: bool) -> Coded<u64> {
        let mut captures = lock(&self.captures);
        let copy = captures.all_of(child)?;
        // The manual (cuGraphAddChildGraphNode): one with nodes that take memory is refused. One cannot be its own part.
        if !copy.memory.is_empty() || graph == child {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let node = captures.next_node();
        let parent = captures.graphs.get_mut(&graph).ok_or(DriverCode::INVALID_VALUE)?;
        if moved {
            parent.children.moved.push((node, child));
        } else {
            parent.add_copy(node, copy.work);
        }
        Ok(node)
    }

    /// The child of `node` does in `executable` what `child` does, where there is as much of it.
    pub(crate) fn replace_child(&self, executable: u64, node: u64, child: u64) -> Coded<()> {
        let mut captures = lock(&self.captures);
        let after = captures.all_of(child)?.work;
        let all = captures.executables.get_mut(&executable).ok_or(DriverCode::INVALID_VALUE)?;
        let found = all.children.copied.iter().find(|(known, _)| *known == node);
        let part = found.map(|(_, part)| part.clone()).ok_or(DriverCode::INVALID_VALUE)?;
        if part.len() != after.len() {
            return Err(DriverCode::INVALID_VALUE);
        }
        all.work.splice(part, after);
        Ok(())
    }
}

impl Captures {
    fn next_node(&mut self) -> u64 {
        self.nodes += 1;
        NODE_FIRST + self.nodes * NODE_STEP
    }
}
