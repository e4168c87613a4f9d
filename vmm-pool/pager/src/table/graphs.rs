//! The chunks that launches of graphs use: all that graphs have recorded. One event behind a launch stands for all of
//! them, but for launches on a thread's own default stream, which hold each chunk.

use std::sync::Arc;

use super::{Mark, WindowChunks, distinct};

impl WindowChunks {
    /// A launch of a graph is over when `mark` is.
    pub(crate) fn graph_used(&mut self, mark: &Arc<Mark>) {
        self.graph_uses.push(Arc::clone(mark));
    }

    /// Graphs used these, and hold them no more. So many lists of launches hold them instead, and they wait for launches that
    /// have ended their list.
    pub(crate) fn graphs_let_go(&mut self, ids: &[usize], lists: u32) {
        for id in distinct(ids) {
            self.chunks[id].uses.extend(self.graph_uses.iter().cloned());
        }
        for &id in ids {
            self.chunks[id].holders += lists;
        }
        self.let_go(ids);
    }

    /// Nobody knows when a use of these is over.
    pub(crate) fn lost(&mut self, ids: &[usize]) {
        self.lost_uses += 1;
        for &id in ids {
            // The driver does not say when its use is over.
            self.chunks[id].stays = true;
        }
    }

    /// The same of the launch of a graph, whose uses are these.
    pub(crate) fn graph_lost(&mut self, ids: &[usize]) {
        for &id in ids {
            self.chunks[id].holders += 1;
        }
        self.lost(ids);
    }
}
